use std::fs::OpenOptions;
use std::io::Write;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::testing::{Stored, check_text, load, store};

/// Parses a header text in front of `data_bytes` bytes; the outcome is `Ok` or a message with all of `expected`.
fn check(header: &serde_json::Value, data_bytes: u64, expected: Result<(), &[&str]>) {
    check_source(&header.to_string(), data_bytes, expected);
}

fn check_source(header: &str, data_bytes: u64, expected: Result<(), &[&str]>) {
    let found = header::parse(Path::new("model.safetensors"), header.as_bytes(), data_bytes);
    match (found, expected) {
        (Ok(_), Ok(())) => {}
        (Err(error), Err(fragments)) => check_text(&error.to_string(), fragments),
        (found, expected) => panic!("{header}: {found:?}, expected {expected:?}"),
    }
}

fn entry(dtype: &str, shape: &[u64], start: u64, end: u64) -> serde_json::Value {
    json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] })
}

#[test]
fn a_header_that_tiles_its_data_is_accepted() {
    check(&json!({}), 0, Ok(()));
    check(
        &json!({ "a": entry("F32", &[2, 3], 0, 24), "b": entry("BF16", &[5], 24, 34) }),
        34,
        Ok(()),
    );
    check(
        &json!({ "b": entry("U8", &[10], 24, 34), "a": entry("F32", &[2, 3], 0, 24) }),
        34,
        Ok(()),
    );
    check(
        &json!({ "__metadata__": { "format": "pt" }, "empty": entry("F32", &[0, 9], 0, 0) }),
        0,
        Ok(()),
    );
    check(&json!({ "scalar": entry("F64", &[], 0, 8) }), 8, Ok(()));
}

#[test]
fn overlaps_holes_and_leftovers_are_refused() {
    let overlap = json!({ "a": entry("U8", &[4], 0, 4), "b": entry("U8", &[4], 2, 6) });
    check(&overlap, 6, Err(&["model.safetensors", "tensor b", "overlaps a"]));
    let same = json!({ "a": entry("U8", &[4], 0, 4), "b": entry("U8", &[4], 0, 4) });
    check(&same, 4, Err(&["tensor b", "overlaps a"]));
    let hole = json!({ "a": entry("U8", &[4], 0, 4), "b": entry("U8", &[4], 5, 9) });
    check(&hole, 9, Err(&["tensor b", "1 bytes between a"]));
    check(&json!({ "a": entry("U8", &[4], 1, 5) }), 5, Err(&["tensor a", "between the beginning"]));
    let whole = json!({ "a": entry("U8", &[4], 0, 4) });
    check(&whole, 5, Err(&["model.safetensors", "bytes follow the last tensor"]));
    check(&whole, 3, Err(&["model.safetensors", "cut short"]));
}

#[test]
fn duplicate_names_are_refused() {
    let text = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    check_source(text, 8, Err(&["tensor a", "the name occurs twice"]));
}

#[test]
fn sizes_that_overflow_are_refused() {
    let huge = u64::MAX;
    check(
        &json!({ "a": entry("F32", &[1 << 62], 0, 0) }),
        0,
        Err(&["tensor a", "overflows 64 bits"]),
    );
    check(
        &json!({ "a": entry("U8", &[1 << 33, 1 << 33], 0, 4) }),
        4,
        Err(&["tensor a", "overflows 64 bits"]),
    );
    check(&json!({ "a": entry("U8", &[huge], 0, huge) }), 4, Err(&["cut short"]));
    let wraps = json!({ "a": entry("U8", &[4], 0, 4), "b": entry("U8", &[huge - 4], 4, huge) });
    check(&wraps, 4, Err(&["cut short"]));
    check(
        &json!({ "a": entry("U8", &[4], 8, 4) }),
        4,
        Err(&["tensor a", "ends at 4, before its start 8"]),
    );
    check(
        &json!({ "a": entry("F32", &[4], 0, 4) }),
        4,
        Err(&["tensor a", "takes 16 bytes, its offsets hold 4"]),
    );
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    check(&json!({ "a": entry("Q3", &[4], 0, 4) }), 4, Err(&["tensor a", "\"Q3\""]));
    let extra =
        json!({ "a": { "dtype": "U8", "shape": [4], "data_offsets": [0, 4], "strides": [1] } });
    check(&extra, 4, Err(&["tensor a", "strides"]));
    check(
        &json!({ "a": { "dtype": "U8", "shape": [-4], "data_offsets": [0, 4] } }),
        4,
        Err(&["tensor a"]),
    );
    check_source("[]", 0, Err(&["not the JSON of a header"]));
    check_source("{", 0, Err(&["not the JSON of a header"]));
    check_source("", 0, Err(&["not the JSON of a header"]));
}

fn small_file(directory: &Path) -> PathBuf {
    let path = directory.join("small.safetensors");
    let tensor = |name: &str, n: u8| Stored {
        name: name.to_owned(),
        dtype: DType::U8,
        shape: vec![n.into()],
        bytes: vec![n; n.into()],
    };
    store(&path, &[tensor("b", 5), tensor("a", 7)]);
    path
}

fn check_file(path: &Path, fragments: &[&str]) {
    check_text(&TensorFile::open(path).unwrap_err().to_string(), fragments);
}

#[test]
fn a_file_of_another_length_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = small_file(directory.path());
    let whole = std::fs::read(&path).unwrap();
    for cut in [0, 3, 8, 100, whole.len() - 1] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        check_file(&path, &["small.safetensors", "cut short"]);
    }
    std::fs::write(&path, &whole).unwrap();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(&[0]).unwrap();
    check_file(
        &path,
        &[
            "small.safetensors",
            "4108 bytes expected, the file has 4109",
            "bytes follow the last tensor",
        ],
    );
}

#[test]
fn a_header_above_the_limit_is_refused_with_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("long.safetensors");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(200_000_000).unwrap();
    (&file).write_all(&132_095_296_u64.to_le_bytes()).unwrap();
    check_file(&path, &["long.safetensors", "132095296 bytes is above the limit of 100000000"]);
    std::fs::write(&path, u64::MAX.to_le_bytes()).unwrap();
    check_file(&path, &["18446744073709551615 bytes is above the limit"]);
}

/// A tensor above 2^31 bytes, in a file with a hole instead of data.
#[test]
fn sizes_beyond_32_bits_are_exact() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("large.safetensors");
    let bytes = 152_064_u64 * 3584 * 4;
    assert!(bytes > 1 << 31);
    let header = json!({ "embed": entry("F32", &[152_064, 3584], 0, bytes) }).to_string();
    let file = std::fs::File::create(&path).unwrap();
    (&file).write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    (&file).write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
    std::os::unix::fs::FileExt::write_all_at(
        &file,
        &1.5_f32.to_le_bytes(),
        8 + header.len() as u64 + bytes - 4,
    )
    .unwrap();
    let file = TensorFile::open(&path).unwrap();
    let mut last = [0; 4];
    let info = file.header().get("embed").unwrap();
    file.read(info, bytes - 4, &mut last).unwrap();
    assert_eq!(f32::from_le_bytes(last).to_bits(), 1.5_f32.to_bits());
}

#[test]
fn our_files_open_with_the_reference_reader() {
    let directory = tempfile::tempdir().unwrap();
    let path = small_file(directory.path());
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 4096 + 12, "data begins on a page boundary");
    let reference = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for tensor in load(&path) {
        assert_eq!(reference.tensor(&tensor.name).unwrap().data(), tensor.bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Damaged files never panic, and whatever is accepted here is accepted by the reference reader.
    #[test]
    fn damage_is_refused_or_harmless(
        edits in prop::collection::vec((0_usize..200, any::<u8>()), 1..4),
        cut in prop::option::of(0_usize..260),
    ) {
        let header = json!({ "a": entry("F32", &[2, 3], 0, 24), "b": entry("BF16", &[5], 24, 34) }).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&[0; 34]);
        for (at, value) in edits {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        if header::parse_file(Path::new("x"), &bytes).is_ok() {
            prop_assert!(::safetensors::SafeTensors::deserialize(&bytes).is_ok());
        }
    }
}

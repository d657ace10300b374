use proptest::prelude::*;

use super::*;
use crate::testing::check_text;

/// Builds files, also wrong ones.
#[derive(Debug, Clone)]
struct Builder {
    version: u32,
    values: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, u64)>,
    data: Vec<u8>,
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}

fn typed(kind: u32, bytes: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], bytes].concat()
}

impl Builder {
    fn new() -> Self {
        let list =
            [&8_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &text("a"), &text("b c")].concat();
        Self {
            version: 3,
            values: vec![
                ("general.architecture".to_owned(), typed(8, &text("llama"))),
                ("count".to_owned(), typed(4, &7_u32.to_le_bytes())),
                ("negative".to_owned(), typed(5, &(-7_i32).to_le_bytes())),
                ("theta".to_owned(), typed(6, &1.5_f32.to_le_bytes())),
                ("flag".to_owned(), typed(7, &[1])),
                ("tokens".to_owned(), typed(9, &list)),
            ],
            tensors: vec![
                ("plain".to_owned(), vec![3, 2], 0, 0),
                ("packed".to_owned(), vec![32, 2], 8, 32),
            ],
            data: [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .chain([0; 8])
                .chain([0x00, 0x3C].into_iter().chain([2; 32]).cycle().take(68))
                .collect(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            out.extend(text(key));
            out.extend(value);
        }
        for (name, dimensions, kind, offset) in &self.tensors {
            out.extend(text(name));
            out.extend(u32::try_from(dimensions.len()).unwrap().to_le_bytes());
            dimensions.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}

fn parse(bytes: Vec<u8>) -> Result<Gguf> {
    Gguf::from_bytes(Path::new("model.gguf"), bytes)
}

/// A file with a change is refused with all fragments.
fn check(change: impl FnOnce(&mut Builder), fragments: &[&str]) {
    let mut builder = Builder::new();
    change(&mut builder);
    let text = parse(builder.bytes()).expect_err("the file must be refused").to_string();
    check_text(&text, &["model.gguf"]);
    check_text(&text, fragments);
}

#[test]
fn metadata_and_tensors_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, Builder::new().bytes()).unwrap();
    for gguf in [parse(Builder::new().bytes()).unwrap(), Gguf::open(&path).unwrap()] {
        assert_eq!(gguf.text("general.architecture").unwrap(), "llama");
        assert_eq!(gguf.number("count").unwrap(), 7);
        assert_eq!(gguf.metadata()["negative"], GgufValue::Signed(-7));
        assert_eq!(gguf.metadata()["theta"], GgufValue::Float(1.5));
        assert_eq!(gguf.metadata()["flag"], GgufValue::Bool(true));
        let tokens = ["a", "b c"].map(|token| GgufValue::Text(token.to_owned()));
        assert_eq!(gguf.list("tokens").unwrap(), tokens);
        assert_eq!(gguf.tensor("plain", &[2, 3]).unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(gguf.tensor("packed", &[2, 32]).unwrap(), [2.0; 64]);
        check_text(
            &gguf.number("negative").unwrap_err().to_string(),
            &["negative", "not a whole number"],
        );
        check_text(&gguf.text("nothing").unwrap_err().to_string(), &["nothing is missing"]);
        check_text(
            &gguf.tensor("plain", &[3, 2]).unwrap_err().to_string(),
            &["plain", "[2, 3]", "[3, 2]"],
        );
        check_text(
            &gguf.tensor("nothing", &[1]).unwrap_err().to_string(),
            &["nothing", "no such tensor"],
        );
    }
}

#[test]
fn damage_is_named() {
    check(|file| file.version = 2, &["version 2 is not 3"]);
    check(|file| file.values[1].0 = "theta".to_owned(), &["theta occurs twice"]);
    check(|file| file.values[1].1 = typed(13, &[0; 4]), &["metadata type 13"]);
    check(|file| file.values[4].1 = typed(7, &[2]), &["2 is no truth value"]);
    check(|file| file.values[0].1 = typed(8, &u64::MAX.to_le_bytes()), &["do not fit the rest"]);
    check(
        |file| {
            file.values[5].1 =
                typed(9, &[&10_u32.to_le_bytes()[..], &(1_u64 << 61).to_le_bytes()].concat())
        },
        &["do not fit"],
    );
    check(|file| file.tensors[1].0 = "plain".to_owned(), &["tensor plain", "occurs twice"]);
    check(|file| file.tensors[0].1 = vec![], &["tensor plain", "0 dimensions"]);
    check(|file| file.tensors[0].1 = vec![1; 5], &["tensor plain", "5 dimensions"]);
    check(
        |file| file.tensors[0].1 = vec![1 << 33, 1 << 33],
        &["tensor plain", "overflows 64 bits"],
    );
    check(|file| file.tensors[0].1 = vec![1 << 20], &["tensor plain", "its data ends at"]);
    check(|file| file.tensors[0].3 = u64::MAX - 31, &["tensor plain", "overflows 64 bits"]);
    check(|file| file.tensors[0].3 = 4, &["tensor plain", "not a multiple of 32"]);
    check(|file| file.tensors[0].3 = 32, &["overlaps"]);
    check(|file| file.tensors[1].1 = vec![16, 2], &["tensor packed", "not whole blocks of 32"]);
    check(|file| file.tensors[1].2 = 12, &["tensor packed", "element type 12 is not implemented"]);
    check(|file| file.data.truncate(60), &["tensor packed", "cut short"]);
    check(
        |file| file.values.push(("general.alignment".to_owned(), typed(4, &3_u32.to_le_bytes()))),
        &["general.alignment"],
    );
    check_text(&parse(b"GGML".repeat(9)).unwrap_err().to_string(), &["does not begin with GGUF"]);
    check_text(&parse(Vec::new()).unwrap_err().to_string(), &["beyond the end of the file"]);
}

#[test]
fn lists_in_lists_end_somewhere() {
    let mut value = typed(9, &[&4_u32.to_le_bytes()[..], &0_u64.to_le_bytes()].concat());
    for _ in 0..50 {
        value = typed(9, &[&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &value[4..]].concat());
    }
    check(|file| file.values.push(("deep".to_owned(), value)), &["metadata type 9"]);
}

#[test]
fn values_that_are_not_finite_are_refused() {
    let mut builder = Builder::new();
    builder.data[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    let text = parse(builder.bytes()).unwrap().tensor("plain", &[2, 3]).unwrap_err().to_string();
    check_text(&text, &["tensor plain", "element 1"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    /// Damaged files never panic and never read outside the file.
    #[test]
    fn damaged_files_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = Builder::new().bytes();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(gguf) = parse(bytes) {
            for (name, tensor) in gguf.tensors() {
                let _outcome = gguf.tensor(name, &tensor.shape);
            }
        }
    }
}

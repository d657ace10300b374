//! Tensors against the configuration. Most tests are cases that users of other programs met.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::json;

use super::*;
use crate::testing::{
    Stored, check_refused, check_warned, checkpoint, edit, edit_json, edit_tensor, load, plan,
    sharded, store,
};
use crate::tiny::{Preset, TinyOptions, TinyType};

fn single(directory: &Path) -> PathBuf {
    directory.join("model.safetensors")
}

fn rename(path: &Path, from: &str, to: &str) {
    edit_tensor(path, from, |tensor| tensor.name = to.to_owned());
}

/// All f32 values of a plan, by canonical name.
fn values(plan: &Plan) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    for (tensor, source) in &plan.trunk {
        all.insert(tensor.name.clone(), plan.reader(source).unwrap().all().unwrap());
    }
    for layer in &plan.layers {
        for (expert, source) in layer.experts.iter().enumerate() {
            for (part, source) in
                [("gate", &source.gate), ("up", &source.up), ("down", &source.down)]
            {
                let name = format!("{}.{expert}.{part}", layer.layer);
                all.insert(name, plan.reader(source).unwrap().all().unwrap());
            }
        }
    }
    all
}

/// Any arrangement of the same weights gives the same values.
#[test]
fn shards_types_and_fusion_change_nothing() {
    for preset in Preset::ALL {
        let expected = values(&plan(checkpoint(preset, &TinyOptions::default()).path()).unwrap());
        for options in [
            TinyOptions { shards: 5, ..TinyOptions::default() },
            TinyOptions { dtype: TinyType::F32, ..TinyOptions::default() },
            TinyOptions { fused: true, shards: 2, ..TinyOptions::default() },
        ] {
            assert_eq!(
                values(&plan(checkpoint(preset, &options).path()).unwrap()),
                expected,
                "{options:?}"
            );
        }
        // f16 has fewer exponents: the smallest values are rounded.
        let half = values(
            &plan(
                checkpoint(preset, &TinyOptions { dtype: TinyType::F16, ..Default::default() })
                    .path(),
            )
            .unwrap(),
        );
        for (name, values) in &expected {
            assert!(values.iter().zip(&half[name]).all(|(a, b)| (a - b).abs() < 1e-6), "{name}");
        }
    }
}

#[test]
fn a_tied_head_is_shared_only_when_the_config_says_so() {
    let directory = checkpoint(Preset::Mixtral, &TinyOptions::default());
    edit(&single(directory.path()), |tensors| {
        tensors.retain(|tensor| tensor.name != "lm_head.weight")
    });
    check_refused(
        directory.path(),
        &["lm_head.weight", "model.safetensors", "tie_word_embeddings to true"],
    );
    edit_json(&directory.path().join("config.json"), |config| {
        config.insert("tie_word_embeddings".to_owned(), true.into());
    });
    assert!(plan(directory.path()).unwrap().config.tie_word_embeddings);
}

#[test]
fn a_tied_head_that_is_stored_must_be_the_embedding() {
    let directory = checkpoint(Preset::Qwen3MoeTied, &TinyOptions::default());
    edit(&single(directory.path()), |tensors| {
        let mut copy = tensors.iter().find(|tensor| tensor.name == EMBEDDING).unwrap().clone();
        copy.name = HEAD.to_owned();
        tensors.push(copy);
    });
    check_warned(directory.path(), &["lm_head.weight is a copy of the embedding"]);
    edit_tensor(&single(directory.path()), HEAD, |tensor| tensor.bytes[77] ^= 1);
    check_refused(directory.path(), &["tie_word_embeddings", "lm_head.weight", "differs"]);
}

#[test]
fn expert_counts_come_from_the_tensors() {
    let experts = BTreeMap::from([(0, 8), (1, 16), (2, 13)]);
    let directory =
        checkpoint(Preset::Qwen3Moe, &TinyOptions { experts, ..TinyOptions::default() });
    let plan = plan(directory.path()).unwrap();
    assert_eq!(plan.config.moe_layers().collect::<Vec<_>>(), [(0, 8), (1, 16), (2, 13)]);
    check_warned(
        directory.path(),
        &["says 13 experts", "layer 0: 8", "layer 1: 16", "the tensors count"],
    );
}

#[test]
fn experts_that_the_router_knows_and_the_files_lack_are_missed() {
    let directory = checkpoint(Preset::Olmoe, &TinyOptions::default());
    edit(&single(directory.path()), |tensors| {
        tensors.retain(|tensor| !tensor.name.contains("layers.1.mlp.experts.15."))
    });
    check_refused(directory.path(), &["model.layers.1.mlp.gate.weight", "[16, 64]", "[15, 64]"]);

    let directory = checkpoint(Preset::Olmoe, &TinyOptions::default());
    edit(&single(directory.path()), |tensors| {
        tensors.retain(|tensor| !tensor.name.contains("layers.1.mlp.experts.3."))
    });
    check_refused(directory.path(), &["model.layers.1.mlp.experts.3.gate_proj.weight is missing"]);
}

#[test]
fn too_few_experts_for_the_gating_rule_are_refused() {
    let experts = BTreeMap::from([(1, 3)]);
    let directory = checkpoint(Preset::Olmoe, &TinyOptions { experts, ..TinyOptions::default() });
    check_refused(
        directory.path(),
        &["config.json", "layer 1", "4 experts per token out of a choice of 3"],
    );
}

#[test]
fn a_missing_projection_is_named_at_load() {
    for name in [
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.2.mlp.experts.7.up_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.shared_experts.gate_proj.weight",
        "model.layers.2.self_attn.k_proj.bias",
    ] {
        let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
        edit(&single(directory.path()), |tensors| tensors.retain(|tensor| tensor.name != name));
        check_refused(directory.path(), &[name, "is missing"]);
    }
}

#[test]
fn a_tensor_of_another_shape_is_refused() {
    let name = "model.layers.0.self_attn.k_proj.weight";
    let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
    edit_tensor(&single(directory.path()), name, |tensor| tensor.shape.reverse());
    check_refused(directory.path(), &["model.safetensors", name, "[64, 32]", "[32, 64]"]);
}

#[test]
fn integers_and_damaged_floats_are_refused() {
    let name = "model.layers.0.self_attn.k_proj.weight";
    let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
    edit_tensor(&single(directory.path()), name, |tensor| tensor.dtype = DType::I16);
    check_refused(directory.path(), &["model.safetensors", name, "I16"]);

    let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
    edit_tensor(&single(directory.path()), name, |tensor| {
        tensor.bytes[20..22].copy_from_slice(&bf16::NAN.to_le_bytes());
    });
    let plan = plan(directory.path()).unwrap();
    let (_, source) = plan.trunk.iter().find(|(tensor, _)| tensor.name == "layers.0.k").unwrap();
    let text = plan.reader(source).unwrap().all().unwrap_err().to_string();
    crate::testing::check_text(&text, &["model.safetensors", name, "element 10"]);
}

#[test]
fn tensors_that_nothing_reads_are_refused() {
    let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
    let name = "model.layers.0.self_attn.q_norm.weight";
    edit(&single(directory.path()), |tensors| {
        tensors.push(Stored {
            name: name.to_owned(),
            dtype: DType::F32,
            shape: vec![1],
            bytes: vec![0; 4],
        });
    });
    check_refused(directory.path(), &[name, "model.safetensors", "glm4_moe"]);
    // A table that every reader computes is no weight.
    rename(&single(directory.path()), name, "model.layers.0.self_attn.rotary_emb.inv_freq");
    plan(directory.path()).unwrap();
}

#[test]
fn extra_prediction_layers_are_left_out_only_if_announced() {
    let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
    edit(&single(directory.path()), |tensors| {
        let name = "model.layers.3.eh_proj.weight".to_owned();
        tensors.push(Stored { name, dtype: DType::F32, shape: vec![1], bytes: vec![0; 4] });
    });
    check_refused(directory.path(), &["model.layers.3.eh_proj.weight"]);
    edit_json(&directory.path().join("config.json"), |config| {
        config.insert("num_nextn_predict_layers".to_owned(), 1.into());
    });
    check_warned(directory.path(), &["1 tensors of 1 extra prediction (MTP) layers are left out"]);
}

/// An optional head that the index promises and no file has is switched off with a note, not fatal.
#[test]
fn an_announced_prediction_layer_may_be_absent() {
    let directory = sharded(Preset::Glm4Moe);
    edit_json(&directory.path().join("config.json"), |config| {
        config.insert("num_nextn_predict_layers".to_owned(), 1.into());
    });
    crate::testing::edit_index(directory.path(), |map| {
        map.insert("model.layers.3.enorm.weight".to_owned(), crate::testing::shard(1).into());
    });
    check_warned(
        directory.path(),
        &["1 tensors of the extra prediction (MTP) layers are in the index but in no file"],
    );
}

#[test]
fn quantised_checkpoints_that_are_not_understood_are_refused() {
    let name = "model.layers.1.mlp.experts.0.gate_proj.weight";
    for suffix in ["_scale", "_scale_inv", "_packed", "_zero_point"] {
        let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
        edit(&single(directory.path()), |tensors| {
            let name = format!("{name}{suffix}");
            tensors.push(Stored { name, dtype: DType::F32, shape: vec![1, 1], bytes: vec![0; 4] });
        });
        check_refused(directory.path(), &[name, "model.safetensors", "quantised"]);
    }
    for (block, fragment) in [
        (json!({ "quant_method": "gptq", "bits": 4 }), "gptq"),
        (json!({ "quant_method": "fp8" }), "without weight_block_size"),
        (json!({ "quant_method": "fp8", "weight_block_size": [64, 64] }), "[64, 64]"),
        (json!({ "quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128] }), "e5m2"),
        (json!({}), "no quant_method"),
    ] {
        let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
        edit_json(&directory.path().join("config.json"), |config| {
            config.insert("quantization_config".to_owned(), block);
        });
        check_refused(directory.path(), &["config.json", "quantization_config", fragment]);
    }
}

/// FP8 E4M3 bytes of values that it holds exactly.
fn to_fp8(tensor: &mut Stored) -> Vec<f32> {
    let bytes: Vec<u8> = (0..tensor.shape.iter().product::<u64>())
        .map(|i| u8::try_from(i % 0x7F).unwrap())
        .collect();
    tensor.dtype = DType::F8_E4M3;
    tensor.bytes = bytes.clone();
    let plain = |byte: u8| {
        let (exponent, mantissa) = (i32::from(byte >> 3), f32::from(byte & 7));
        if exponent == 0 {
            mantissa * 2f32.powi(-9)
        } else {
            (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7)
        }
    };
    bytes.into_iter().map(plain).collect()
}

#[test]
fn fp8_is_read_with_its_scales_and_refused_without() {
    let name = "model.layers.1.mlp.experts.0.gate_proj.weight";
    let scale = format!("{name}_scale_inv");
    let directory = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
    let path = single(directory.path());
    let mut tensors = load(&path);
    let expected: Vec<f32> = to_fp8(tensors.iter_mut().find(|tensor| tensor.name == name).unwrap())
        .iter()
        .map(|value| value * 0.5)
        .collect();
    store(&path, &tensors);
    check_refused(directory.path(), &[name, "F8_E4M3 without a quantization_config"]);

    edit_json(&directory.path().join("config.json"), |config| {
        let block = json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic" });
        config.insert("quantization_config".to_owned(), block);
    });
    check_refused(directory.path(), &[&scale, "is missing"]);

    edit(&path, |tensors| {
        let bytes = 0.5_f32.to_le_bytes().to_vec();
        tensors.push(Stored { name: scale.clone(), dtype: DType::F32, shape: vec![1, 1], bytes });
    });
    assert_eq!(values(&plan(directory.path()).unwrap())["1.0.gate"], expected);

    edit_tensor(&path, &scale, |tensor| {
        tensor.shape = vec![2, 1];
        tensor.bytes = vec![0; 8];
    });
    check_refused(directory.path(), &[&scale, "[2, 1]", "[1, 1]"]);
}

#[test]
fn fused_experts_of_another_order_are_refused() {
    let directory =
        checkpoint(Preset::Mixtral, &TinyOptions { fused: true, ..TinyOptions::default() });
    let name = "model.layers.0.block_sparse_moe.experts.gate_up_proj";
    edit_tensor(&single(directory.path()), name, |tensor| tensor.shape = vec![8, 64, 96]);
    check_refused(directory.path(), &[name, "[8, 64, 96]", "[8, 96, 64]", "experts come first"]);
}

#[test]
fn a_hostile_expert_number_is_refused() {
    let directory = checkpoint(Preset::Olmoe, &TinyOptions::default());
    let from = "model.layers.0.mlp.experts.3.up_proj.weight";
    for number in [u64::from(u32::MAX), u64::MAX] {
        let to = format!("model.layers.0.mlp.experts.{number}.up_proj.weight");
        let before = std::fs::read(single(directory.path())).unwrap();
        rename(&single(directory.path()), from, &to);
        check_refused(directory.path(), &["layer 0", "experts are not between"]);
        std::fs::write(single(directory.path()), before).unwrap();
    }
}

use std::path::Path;

use serde_json::{Map, Value, json};
use shimmer_kernels::gating::Score;

use super::*;
use crate::error::Result;
use crate::testing::check_text;
use crate::tiny::Preset;

fn read(map: &Map<String, Value>) -> Result<ReadConfig> {
    read::normalise(Path::new("config.json"), map)
}

/// A preset's configuration with keys set, or removed by null.
fn with(preset: Preset, changes: Value) -> Map<String, Value> {
    let mut map = preset.config();
    for (key, value) in changes.as_object().unwrap() {
        if value.is_null() {
            map.remove(key);
        } else {
            map.insert(key.clone(), value.clone());
        }
    }
    map
}

/// The configuration with the changes is refused with all fragments, one of which should be the key.
fn check_refused(preset: Preset, changes: Value, fragments: &[&str]) {
    let text =
        read(&with(preset, changes)).expect_err("the configuration must be refused").to_string();
    check_text(&text, &["config.json"]);
    check_text(&text, fragments);
}

/// The configuration with the changes is the same as without.
fn check_same(preset: Preset, changes: Value) {
    assert_eq!(
        read(&with(preset, changes)).unwrap().config,
        read(&preset.config()).unwrap().config
    );
}

#[test]
fn the_families_normalise_as_documented() {
    let glm = read(&Preset::Glm4Moe.config()).unwrap().config;
    assert_eq!(glm.rope, RopeConfig { theta: 10_000.0, rotary_dim: 8 });
    assert_eq!(
        (glm.attention.qkv_bias, glm.attention.o_bias, glm.attention.qk_norm),
        (true, false, QkNorm::None)
    );
    assert_eq!(glm.layers[0].ffn, Ffn::Dense { intermediate: 96 });
    let moe = Ffn::Moe {
        experts: 16,
        intermediate: 32,
        shared_intermediate: Some(32),
        correction_bias: true,
    };
    assert_eq!(glm.layers[2].ffn, moe);
    let gating = glm.gating.unwrap();
    assert_eq!(
        (gating.score, gating.top_k, gating.normalise, gating.scale),
        (Score::Sigmoid, 4, true, 2.5)
    );
    assert_eq!(gating.normalise_eps.to_bits(), 1e-20_f32.to_bits());

    let groups = read(&Preset::Glm4MoeGroups.config()).unwrap().config;
    assert_eq!(groups.attention.qk_norm, QkNorm::PerHead);
    assert_eq!(groups.rope, RopeConfig { theta: 1e6, rotary_dim: 16 });
    let gating = groups.gating.unwrap();
    assert_eq!((gating.groups, gating.groups_kept, gating.normalise), (4, 2, false));

    let qwen = read(&Preset::Qwen3MoeTied.config()).unwrap().config;
    assert!(qwen.tie_word_embeddings);
    assert_eq!(qwen.moe_layers().collect::<Vec<_>>(), [(0, 7), (2, 7)]);
    assert_eq!(qwen.attention.qk_norm, QkNorm::PerHead);

    let mixtral = read(&Preset::Mixtral.config()).unwrap().config;
    assert_eq!((mixtral.attention.head_dim, mixtral.rope.rotary_dim), (16, 16));
    let gating = mixtral.gating.unwrap();
    assert_eq!((gating.score, gating.normalise, gating.normalise_eps), (Score::Softmax, true, 0.0));

    let olmoe = read(&Preset::Olmoe.config()).unwrap().config;
    assert_eq!(olmoe.attention.qk_norm, QkNorm::Whole);
    assert!(!olmoe.gating.unwrap().normalise);
}

#[test]
fn both_spellings_of_a_key_are_one_value() {
    for preset in [Preset::Glm4Moe, Preset::Mixtral, Preset::Olmoe] {
        let theta = preset.config()["rope_theta"].clone();
        let partial = preset.config().get("partial_rotary_factor").cloned().unwrap_or(json!(1.0));
        check_same(
            preset,
            json!({
                "rope_theta": null, "rope_scaling": null, "partial_rotary_factor": null,
                "rope_parameters": { "rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial },
            }),
        );
    }
    check_same(Preset::Qwen3Moe, json!({ "num_experts": null, "num_local_experts": 13 }));
    check_same(
        Preset::Glm4Moe,
        json!({ "first_k_dense_replace": null, "mlp_layer_types": ["dense", "sparse", "sparse"] }),
    );
    check_same(Preset::Glm4Moe, json!({ "scoring_func": "sigmoid", "topk_method": "noaux_tc" }));
    check_same(
        Preset::Mixtral,
        json!({ "hidden_act": "swish", "sliding_window": 4096, "head_dim": 16 }),
    );
}

#[test]
fn two_spellings_that_disagree_are_refused() {
    let rope = json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5000.0 } });
    check_refused(
        Preset::Mixtral,
        rope,
        &["rope_parameters.rope_theta", "5000 contradicts 1000000"],
    );
    check_refused(
        Preset::Qwen3Moe,
        json!({ "num_local_experts": 8 }),
        &["num_experts", "contradicts"],
    );
    let types = json!({ "mlp_layer_types": ["dense", "dense", "sparse"] });
    check_refused(Preset::Glm4Moe, types, &["mlp_layer_types", "contradicts"]);
}

#[test]
fn the_default_rope_type_scales_nothing() {
    for key in ["rope_type", "type"] {
        check_same(Preset::Mixtral, json!({ "rope_scaling": { key: "default" } }));
    }
    check_same(Preset::Mixtral, json!({ "rope_scaling": {} }));
}

#[test]
fn rope_types_that_are_not_implemented_are_refused() {
    for kind in ["llama3", "yarn", "linear", "dynamic", "longrope", "mrope", "made-up"] {
        for (block, key) in [("rope_scaling", "type"), ("rope_parameters", "rope_type")] {
            let changes = json!({ block: { key: kind, "factor": 8.0 } });
            check_refused(Preset::Mixtral, changes, &[block, kind, "not implemented"]);
        }
    }
    let untyped = json!({ "rope_scaling": { "factor": 4.0 } });
    check_refused(
        Preset::Mixtral,
        untyped,
        &["rope_scaling.rope_type", "has no type but has factor"],
    );
    check_refused(
        Preset::Mixtral,
        json!({ "rope_theta": null }),
        &["rope_theta", "no value is assumed"],
    );
}

#[test]
fn unknown_keys_of_the_rope_block_are_reported() {
    let changes = json!({ "rope_scaling": { "rope_type": "default", "attn_factor": 0.5 } });
    let read = read(&with(Preset::Mixtral, changes)).unwrap();
    assert_eq!(read.config, super::tests::read(&Preset::Mixtral.config()).unwrap().config);
    check_text(&read.warnings.join("\n"), &["rope_scaling.attn_factor", "no effect"]);
}

#[test]
fn unknown_keys_are_reported() {
    let read = read(&with(Preset::Mixtral, json!({ "hyper_connection_rate": 4 }))).unwrap();
    check_text(&read.warnings.join("\n"), &["hyper_connection_rate is not understood"]);
}

#[test]
fn what_changes_numbers_and_is_not_implemented_is_refused() {
    check_refused(Preset::Olmoe, json!({ "clip_qkv": 8.0 }), &["clip_qkv", "not implemented"]);
    check_refused(
        Preset::Mixtral,
        json!({ "sliding_window": 512 }),
        &["sliding_window", "512 positions"],
    );
    let window = json!({ "use_sliding_window": true, "sliding_window": 512 });
    check_refused(Preset::Qwen3Moe, window, &["sliding_window", "512 positions"]);
    check_same(Preset::Qwen3Moe, json!({ "use_sliding_window": false, "sliding_window": 512 }));
    check_refused(Preset::Mixtral, json!({ "hidden_act": "gelu" }), &["hidden_act", "gelu"]);
    check_refused(
        Preset::Mixtral,
        json!({ "hidden_act": null }),
        &["hidden_act", "no activation is assumed"],
    );
    check_refused(
        Preset::Glm4Moe,
        json!({ "scoring_func": "softmax" }),
        &["scoring_func", "softmax"],
    );
    check_refused(
        Preset::Qwen3Moe,
        json!({ "scoring_func": "sigmoid" }),
        &["scoring_func", "sigmoid"],
    );
    check_refused(Preset::Glm4Moe, json!({ "topk_method": "greedy" }), &["topk_method", "greedy"]);
    check_refused(
        Preset::Mixtral,
        json!({ "final_logit_softcapping": 30.0 }),
        &["final_logit_softcapping"],
    );
    check_refused(
        Preset::Mixtral,
        json!({ "layer_types": ["sliding_attention"] }),
        &["layer_types"],
    );
}

#[test]
fn families_that_are_not_supported_are_named() {
    for family in ["glm_moe_dsa", "deepseek_v3", "llama"] {
        let supported = "glm4_moe, qwen3_moe, mixtral, olmoe";
        check_refused(Preset::Mixtral, json!({ "model_type": family }), &[family, supported]);
    }
    check_refused(
        Preset::Mixtral,
        json!({ "model_type": null }),
        &["model_type", "no default family"],
    );
}

#[test]
fn impossible_values_are_refused_by_key() {
    for (preset, key, value) in [
        (Preset::Mixtral, "hidden_size", json!(0)),
        (Preset::Mixtral, "hidden_size", json!(-64)),
        (Preset::Mixtral, "hidden_size", json!("64")),
        (Preset::Mixtral, "vocab_size", json!(u64::MAX)),
        (Preset::Mixtral, "num_key_value_heads", json!(3)),
        (Preset::Mixtral, "num_hidden_layers", json!(1_000_000)),
        (Preset::Mixtral, "rms_norm_eps", json!(0.0)),
        (Preset::Mixtral, "rope_theta", json!(0.5)),
        (Preset::Mixtral, "num_experts_per_tok", json!(null)),
        (Preset::Glm4Moe, "partial_rotary_factor", json!(1.5)),
        (Preset::Glm4Moe, "partial_rotary_factor", json!(0.2)),
        (Preset::Glm4Moe, "topk_group", json!(2)),
        (Preset::Glm4Moe, "routed_scaling_factor", json!(-1.0)),
        (Preset::Glm4Moe, "n_shared_experts", json!(null)),
        (Preset::Qwen3Moe, "decoder_sparse_step", json!(0)),
        (Preset::Qwen3Moe, "mlp_only_layers", json!([9])),
        (Preset::Qwen3Moe, "norm_topk_prob", json!(null)),
        (Preset::Qwen3Moe, "eos_token_id", json!([1, "x"])),
    ] {
        check_refused(preset, json!({ key: value }), &[key]);
    }
    check_refused(
        Preset::Qwen3Moe,
        json!({ "num_experts": null }),
        &["n_routed_experts / num_local_experts / num_experts"],
    );
}

#[test]
fn the_description_survives_its_json() {
    for preset in Preset::ALL {
        let config = read(&preset.config()).unwrap().config;
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ModelConfig>(&text).unwrap(), config);
        assert_eq!(config.fault(), None);
    }
}

#[test]
fn stop_ids_come_from_the_generation_config_first() {
    let directory =
        crate::testing::checkpoint(Preset::Mixtral, &crate::tiny::TinyOptions::default());
    let generation = directory.path().join("generation_config.json");
    std::fs::write(&generation, r#"{"eos_token_id": [257, 260]}"#).unwrap();
    assert_eq!(read_config(directory.path()).unwrap().config.eos_token_ids, [257, 260]);
    std::fs::write(&generation, r#"{"eos_token_id": 100000}"#).unwrap();
    check_text(
        &read_config(directory.path()).unwrap_err().to_string(),
        &["100000", "vocabulary size 269"],
    );
    std::fs::remove_file(&generation).unwrap();
    assert_eq!(read_config(directory.path()).unwrap().config.eos_token_ids, [257]);
}

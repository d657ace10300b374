//! The tiny checkpoints of every family against what transformers computed on them (`tests/oracle/make_tiny.py`).

mod engine;

use std::{fs, path::Path};

use safetensors::SafeTensors;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use shimmer_model::tiny::{self, Preset, TinyOptions};
use shimmer_tests::{models::TinyModel, reference::Model};

/// Largest allowed difference of a logit in f32.
const F32_BOUND: f64 = 2e-5;

/// Chosen experts may differ only where the selection was closer than this.
const SELECTION_MARGIN: f64 = 1e-4;

/// What is recorded of one checkpoint.
#[derive(Debug, Deserialize)]
struct Recorded {
    weights_sha256: String,
    ids: Vec<u32>,
    /// Positions whose logits are recorded.
    positions: Vec<usize>,
    greedy: Vec<u32>,
    /// Chosen experts by MoE layer and position, ascending.
    routed: Vec<Vec<Vec<usize>>>,
    #[serde(skip)]
    logits: Vec<Vec<f32>>,
}

fn recorded(preset: Preset) -> Recorded {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny");
    let text = fs::read(directory.join(format!("{}.json", preset.name()))).unwrap();
    let mut recorded: Recorded = serde_json::from_slice(&text).unwrap();
    let bytes = fs::read(directory.join(format!("{}.safetensors", preset.name()))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let logits = file.tensor("logits").unwrap();
    let vocabulary = logits.shape()[1];
    let values = logits
        .data()
        .chunks_exact(4)
        .map(|quad| f32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]));
    recorded.logits =
        values.collect::<Vec<_>>().chunks_exact(vocabulary).map(<[f32]>::to_vec).collect();
    recorded
}

fn largest_difference<T: Copy + Into<f64>>(recorded: &Recorded, logits: &[Vec<T>]) -> f64 {
    let rows = recorded.positions.iter().map(|&position| &logits[position]).zip(&recorded.logits);
    let differences = rows.flat_map(|(ours, theirs)| {
        assert_eq!(ours.len(), theirs.len(), "size of the vocabulary");
        ours.iter().zip(theirs).map(|(&ours, &theirs)| (ours.into() - f64::from(theirs)).abs())
    });
    differences.fold(0.0, f64::max)
}

#[test]
fn checkpoints_are_those_that_transformers_read() {
    for preset in Preset::ALL {
        let mut tensors = tiny::tensors(preset, &TinyOptions::default());
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let mut hasher = Sha256::new();
        for tensor in &tensors {
            hasher.update(tensor.name.as_bytes());
            hasher.update([0]);
            tensor.values.iter().for_each(|value| hasher.update(value.to_le_bytes()));
        }
        assert_eq!(
            hex::encode(hasher.finalize()),
            recorded(preset).weights_sha256,
            "{}",
            preset.name()
        );
    }
}

#[test]
fn reference_agrees_with_transformers() {
    for preset in Preset::ALL {
        let (name, recorded, model) = (preset.name(), recorded(preset), TinyModel::new(preset));
        let forward = Model::open(&model.checkpoint()).forward(&recorded.ids);
        let worst = largest_difference(&recorded, &forward.logits);
        assert!(worst <= F32_BOUND, "{name}: the reference is {worst:e} from transformers");
        assert_eq!(forward.routed.len(), recorded.routed.len(), "{name}: MoE layers");
        for (layer, (ours, theirs)) in forward.routed.iter().zip(&recorded.routed).enumerate() {
            for (position, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                let margin = forward.margins[layer][position];
                assert!(
                    ours == theirs || margin < SELECTION_MARGIN,
                    "{name}: layer {layer}, position {position}"
                );
            }
        }
    }
}

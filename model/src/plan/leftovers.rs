//! What is in a checkpoint and in no plan. Dropping it in silence would run another model than the one that was given.

use super::Builder;
use crate::error::{Error, Result};

/// Parts of names that only quantised checkpoints have.
const QUANTISED: [&str; 9] = [
    "scale",
    "qweight",
    "qzeros",
    "zero_point",
    "g_idx",
    "packed",
    "blocks",
    "quant_state",
    "absmax",
];

impl Builder<'_> {
    /// Refuses leftovers, but for extra prediction layers that the configuration announces and buffers without effect.
    pub(super) fn leftovers(&mut self, extra_layers: usize) -> Result<()> {
        let extra = |name: &str| {
            let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
            let layer: Option<usize> = layer.and_then(|layer| layer.parse().ok());
            let first = self.config.layers.len();
            layer.is_some_and(|layer| layer >= first && layer < first.saturating_add(extra_layers))
        };
        let unused: Vec<_> = self
            .checkpoint
            .tensors()
            .filter(|(name, _, _)| !self.used.contains(*name) && !is_buffer(name))
            .collect();
        let (skipped, unexpected): (Vec<_>, Vec<_>) =
            unused.into_iter().partition(|(name, _, _)| extra(name));
        if let Some((name, file, _)) = unexpected.iter().find(|(name, _, _)| is_quantised(name)) {
            return Err(Error::Quantised {
                file: file.path().to_path_buf(),
                what: format!("tensor {name}"),
                detail: "it belongs to a quantised weight, and its form is not known".to_owned(),
                hint: "convert from the bf16 release of this model",
            });
        }
        if let Some((name, file, _)) = unexpected.first() {
            return Err(Error::UnexpectedTensors {
                directory: self.checkpoint.directory().to_path_buf(),
                family: self.config.family.to_string(),
                count: unexpected.len(),
                tensor: (*name).to_owned(),
                file: file.path().file_name().unwrap_or_default().to_string_lossy().into_owned(),
                hint: "check that config.json belongs to these weights; leaving tensors out would run another model",
            });
        }
        if let Some(name) = self.checkpoint.unfulfilled().find(|name| !extra(name)) {
            return Err(self
                .checkpoint
                .missing(name, "index and files do not belong together: download them again"));
        }
        let lost = self.checkpoint.unfulfilled().count();
        let mut notes = Vec::new();
        if !skipped.is_empty() {
            notes.push(format!(
                "{} tensors of {extra_layers} extra prediction (MTP) layers are left out: speculative decoding with them is \
                 not supported",
                skipped.len()
            ));
        }
        if lost > 0 {
            notes.push(format!("{lost} tensors of the extra prediction (MTP) layers are in the index but in no file"));
        }
        self.warnings.append(&mut notes);
        Ok(())
    }
}

/// Tables that some writers store and every reader computes.
fn is_buffer(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

fn is_quantised(name: &str) -> bool {
    let last = name.rsplit_once("_proj").map_or(name, |(_, rest)| rest);
    QUANTISED.iter().any(|part| last.contains(part))
}

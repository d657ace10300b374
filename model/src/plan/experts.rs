//! The routed experts of a checkpoint: how many each layer has, and where their matrices are, as one tensor per matrix
//! or fused into one per layer.
//!
//! The tensors say how many experts a layer has; the configuration is a cross-check. Pruned models have fewer than their
//! original's configuration says, and layers may differ.

use std::collections::{BTreeMap, BTreeSet};

use super::{Builder, ExpertSource, LayerPlan, RESTORE, Source, expect_shape};
use crate::checkpoint::TensorReader;
use crate::config::{FP8_SCALE_SUFFIX, Family, Ffn};
use crate::error::{Error, Result};

/// Fused experts: `[experts, 2 * intermediate, hidden]`, gate rows first, and `[experts, hidden, intermediate]`.
const FUSED: [&str; 2] = ["gate_up_proj", "down_proj"];

/// What the tensor names say about the experts of one layer.
#[derive(Debug, Default)]
pub(super) struct FoundExperts {
    /// Between the layer and `experts`: `mlp` or `block_sparse_moe`.
    block: String,
    numbers: BTreeSet<usize>,
    /// Experts by the first dimension of a fused tensor.
    fused: Option<usize>,
}

impl FoundExperts {
    fn count(&self) -> usize {
        self.fused.unwrap_or_else(|| self.numbers.last().map_or(0, |last| last.saturating_add(1)))
    }
}

impl Builder<'_> {
    /// The module that holds router and experts of a layer. Mixtral files have a name of their own for it; newer writers
    /// may use the common one.
    pub(super) fn expert_block(&self, layer: &str) -> &'static str {
        let own = format!("model.layers.{layer}.block_sparse_moe.gate.weight");
        let common = format!("model.layers.{layer}.mlp.gate.weight");
        let own_wanted =
            self.config.family == Family::Mixtral && !self.checkpoint.contains(&common);
        if own_wanted || self.checkpoint.contains(&own) { "block_sparse_moe" } else { "mlp" }
    }

    /// Collects expert numbers by layer from the names of all tensors.
    pub(super) fn find_experts(&self) -> Result<BTreeMap<usize, FoundExperts>> {
        let mut layers: BTreeMap<usize, FoundExperts> = BTreeMap::new();
        for (name, _, info) in self.checkpoint.tensors() {
            let Some((layer, block, rest)) = parse(name) else { continue };
            if layer >= self.config.layers.len() {
                continue;
            }
            let found = layers.entry(layer).or_default();
            found.block = block.to_owned();
            match rest.split('.').next().map(|first| (first, first.parse())) {
                Some((_, Ok(number))) => {
                    found.numbers.insert(number);
                }
                Some((first, Err(_))) if FUSED.contains(&first) && first == rest => {
                    found.fused = info.shape.first().and_then(|&count| usize::try_from(count).ok());
                }
                _ => {}
            }
        }
        let mixed =
            layers.iter().find(|(_, found)| found.fused.is_some() && !found.numbers.is_empty());
        match mixed {
            None => Ok(layers),
            Some((layer, found)) => Err(Error::DuplicateTensor {
                tensor: format!("model.layers.{layer}.{}.experts", found.block),
                first: "a fused tensor".to_owned(),
                second: "one tensor per expert".to_owned(),
            }),
        }
    }

    /// Puts the counts of the tensors into the configuration, and checks the whole.
    pub(super) fn settle_config(&mut self, found: &BTreeMap<usize, FoundExperts>) -> Result<()> {
        let mut differing = Vec::new();
        let mut said = 0;
        for (index, layer) in self.config.layers.iter_mut().enumerate() {
            let Ffn::Moe { experts, .. } = &mut layer.ffn else { continue };
            let count = found.get(&index).map_or(0, FoundExperts::count);
            if count == 0 {
                let block =
                    if self.config.family == Family::Mixtral { "block_sparse_moe" } else { "mlp" };
                let name = format!("model.layers.{index}.{block}.experts.0");
                return Err(self.checkpoint.missing(&name, RESTORE));
            }
            if count != *experts {
                said = *experts;
                differing.push(format!("layer {index}: {count}"));
                *experts = count;
            }
        }
        if !differing.is_empty() {
            let more = differing.len().saturating_sub(4);
            let list = differing.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
            let more = if more > 0 { format!(" and {more} more layers") } else { String::new() };
            self.warnings.push(format!(
                "config.json says {said} experts per layer, the tensors hold another number ({list}{more}); the tensors count"
            ));
        }
        match self.config.fault() {
            None => Ok(()),
            Some(problem) => Err(Error::Config {
                file: self.checkpoint.directory().join("config.json"),
                key: "with the experts found in the tensors".to_owned(),
                problem,
                hint: RESTORE.to_owned(),
            }),
        }
    }

    pub(super) fn layers(
        &mut self,
        found: &BTreeMap<usize, FoundExperts>,
    ) -> Result<Vec<LayerPlan>> {
        let mut plans = Vec::new();
        let widths: Vec<(usize, usize, usize)> = self
            .config
            .layers
            .iter()
            .enumerate()
            .filter_map(|(index, layer)| match layer.ffn {
                Ffn::Moe { experts, intermediate, .. } => Some((index, experts, intermediate)),
                Ffn::Dense { .. } => None,
            })
            .collect();
        for (index, count, width) in widths {
            let found = found.get(&index).expect("settle_config refuses a layer without experts");
            let prefix = format!("model.layers.{index}.{}.experts", found.block);
            let experts = if found.fused.is_some() {
                self.fused(&prefix, count, width)?
            } else {
                (0..count)
                    .map(|expert| self.separate(&format!("{prefix}.{expert}"), width))
                    .collect::<Result<_>>()?
            };
            let layer = u32::try_from(index).expect("the number of layers is limited");
            plans.push(LayerPlan { layer, experts });
        }
        Ok(plans)
    }

    fn separate(&mut self, prefix: &str, width: usize) -> Result<ExpertSource> {
        let hidden = self.config.hidden_size;
        let common = self.config.family != Family::Mixtral
            || self.checkpoint.contains(&format!("{prefix}.gate_proj.weight"));
        let [gate, up, down] =
            if common { ["gate_proj", "up_proj", "down_proj"] } else { ["w1", "w3", "w2"] };
        Ok(ExpertSource {
            gate: self.matrix(&format!("{prefix}.{gate}.weight"), width, hidden)?,
            up: self.matrix(&format!("{prefix}.{up}.weight"), width, hidden)?,
            down: self.matrix(&format!("{prefix}.{down}.weight"), hidden, width)?,
        })
    }

    fn fused(&mut self, prefix: &str, count: usize, width: usize) -> Result<Vec<ExpertSource>> {
        let hidden = self.config.hidden_size;
        let [gate_up, down] = FUSED.map(|part| format!("{prefix}.{part}"));
        let rows = [(&gate_up, [count, 2 * width, hidden]), (&down, [count, hidden, width])];
        for (name, shape) in rows {
            let (file, info) = self.require(name)?;
            let hint =
                "experts come first, then output rows: tensors of another order are not read";
            expect_shape(file, name, info, &shape.map(|n| n as u64), hint)?;
            TensorReader::new(name, file, info, false)?;
            if self.checkpoint.contains(&format!("{name}{FP8_SCALE_SUFFIX}")) {
                return Err(Error::Quantised {
                    file: file.path().to_path_buf(),
                    what: format!("tensor {name}"),
                    detail: "fused experts with scales".to_owned(),
                    hint: "convert from the bf16 release of this model",
                });
            }
            self.used.insert(name.clone());
        }
        let part = |tensor: &String, first_row: usize, rows: usize, cols: usize| Source {
            tensor: tensor.clone(),
            first: first_row as u64 * cols as u64,
            rows,
            cols,
            fp8_block: None,
        };
        Ok((0..count)
            .map(|expert| ExpertSource {
                gate: part(&gate_up, 2 * width * expert, width, hidden),
                up: part(&gate_up, 2 * width * expert + width, width, hidden),
                down: part(&down, hidden * expert, hidden, width),
            })
            .collect())
    }
}

/// Layer, module and the rest of `model.layers.N.MODULE.experts.REST`.
fn parse(name: &str) -> Option<(usize, &str, &str)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (block, rest) = rest.split_once(".experts.")?;
    matches!(block, "mlp" | "block_sparse_moe").then_some(())?;
    Some((layer.parse().ok()?, block, rest))
}

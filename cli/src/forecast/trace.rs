//! Which experts are wanted, step by step and layer by layer.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use super::ForecastError;
use crate::routing::Sent;

/// One line of a trace: what one layer of one step wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LayerUse {
    /// Number of the step; ascends within a trace.
    pub(crate) step: u64,
    pub(crate) layer: u32,
    /// Rows of the step.
    pub(crate) rows: u32,
    /// Expert, and the rows that go to it; by expert.
    pub(crate) experts: Vec<(u32, u32)>,
}

/// A whole generation, or several in a row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Trace {
    pub(crate) lines: Vec<LayerUse>,
}

/// What a made-up generation is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape<'a> {
    /// Layers with experts, and how many each has.
    pub(crate) layers: &'a [(u32, u32)],
    /// Experts of a row.
    pub(crate) top_k: usize,
    pub(crate) prompt: u32,
    /// Rows of a prompt step.
    pub(crate) chunk: u32,
    pub(crate) decode: u32,
    /// Rows of a decode step.
    pub(crate) batch: u32,
    pub(crate) seed: u64,
}

impl Trace {
    /// Joins what was sent to the workers of a run.
    pub(crate) fn of(sent: &[Sent]) -> Self {
        let mut uses: BTreeMap<(u64, u32), (u32, BTreeMap<u32, u32>)> = BTreeMap::new();
        for Sent { step, layer, rows, experts, .. } in sent {
            let (most, of) = uses.entry((*step, *layer)).or_default();
            *most = (*most).max(*rows);
            for (expert, rows) in experts {
                *of.entry(*expert).or_default() += rows;
            }
        }
        let line = |((step, layer), (rows, experts)): ((u64, u32), (u32, BTreeMap<u32, u32>))| {
            LayerUse { step, layer, rows, experts: experts.into_iter().collect() }
        };
        let mut lines: Vec<LayerUse> = uses.into_iter().map(line).collect();
        // A row that only one of several workers has is still a row of the step.
        let mut most: BTreeMap<u64, u32> = BTreeMap::new();
        for line in &lines {
            let rows = most.entry(line.step).or_default();
            *rows = (*rows).max(line.rows);
        }
        for line in &mut lines {
            line.rows = most[&line.step];
        }
        Self { lines }
    }

    /// Every expert as likely as any other, by a fixed walk: what is assumed without a trace.
    pub(crate) fn uniform(shape: &Shape<'_>) -> Self {
        let Shape { layers, top_k, prompt, chunk, decode, batch, seed } = *shape;
        let chunks = prompt.div_ceil(chunk.max(1));
        let rows_of = |step: u32| {
            if step < chunks { chunk.min(prompt - step * chunk) } else { batch }
        };
        let mut state = seed;
        let mut lines = Vec::new();
        for step in 0..chunks + decode {
            let rows = rows_of(step);
            for &(layer, experts) in layers {
                let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
                for _ in 0..rows {
                    let mut chosen: Vec<u32> = Vec::with_capacity(top_k);
                    while chosen.len() < top_k.min(experts as usize) {
                        let drawn = next(&mut state) % u64::from(experts);
                        let expert = u32::try_from(drawn).expect("below a count of experts");
                        if !chosen.contains(&expert) {
                            chosen.push(expert);
                        }
                    }
                    for expert in chosen {
                        *counts.entry(expert).or_default() += 1;
                    }
                }
                let experts = counts.into_iter().collect();
                lines.push(LayerUse { step: u64::from(step), layer, rows, experts });
            }
        }
        Self { lines }
    }

    /// Reads a file of JSON Lines.
    ///
    /// # Errors
    /// It cannot be read, or a line is none of a trace.
    pub(crate) fn read(path: &Path) -> Result<Self, ForecastError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ForecastError::Read { path: name.clone(), source })?;
        Self::parse(&text).map_err(|message| ForecastError::Parse { path: name, message })
    }

    /// Parses JSON Lines.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut lines: Vec<LayerUse> = Vec::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let number = number + 1;
            let used: LayerUse =
                serde_json::from_str(line).map_err(|error| format!("line {number}: {error}"))?;
            let bad = |why: &str| format!("line {number}: {why}");
            if lines.last().is_some_and(|last| last.step > used.step) {
                return Err(bad("steps do not ascend"));
            }
            if used.rows == 0 || used.experts.iter().any(|(_, rows)| *rows == 0) {
                return Err(bad("0 rows go nowhere"));
            }
            if used.experts.iter().any(|(_, rows)| *rows > used.rows) {
                return Err(bad("an expert has more rows than the step"));
            }
            if used.experts.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
                return Err(bad("experts do not ascend"));
            }
            lines.push(used);
        }
        if lines.is_empty() {
            return Err("it has no line".to_owned());
        }
        Ok(Self { lines })
    }

    /// The file.
    pub(crate) fn to_json_lines(&self) -> String {
        let line = |line: &LayerUse| serde_json::to_string(line).expect("numbers are JSON") + "\n";
        self.lines.iter().map(line).collect()
    }

    /// Refuses experts that the model does not have.
    pub(crate) fn check(&self, layers: &[(u32, u32)]) -> Result<(), String> {
        for LayerUse { layer, experts, .. } in &self.lines {
            let Some((_, count)) = layers.iter().find(|(known, _)| known == layer) else {
                return Err(format!(
                    "the trace has experts of layer {layer}, the container has none"
                ));
            };
            if let Some((expert, _)) = experts.iter().find(|(expert, _)| expert >= count) {
                return Err(format!(
                    "the trace has expert {expert} of layer {layer}, the container has {count}"
                ));
            }
        }
        Ok(())
    }

    /// Tokens of the prompt: the rows before the last steps of one row each, of which a prompt of one token is the first.
    pub(crate) fn prompt(&self) -> u32 {
        let rows: Vec<u32> = self.steps().map(|lines| lines[0].rows).collect();
        let decode = rows.iter().rev().take_while(|rows| **rows == 1).count();
        rows[..rows.len() - decode.min(rows.len().saturating_sub(1))].iter().sum()
    }

    /// Its lines by step.
    pub(crate) fn steps(&self) -> impl Iterator<Item = &[LayerUse]> {
        self.lines.chunk_by(|a, b| a.step == b.step)
    }
}

/// `SplitMix64`.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

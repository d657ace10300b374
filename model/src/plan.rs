//! Where every tensor of a container comes from in a checkpoint. A plan exists only for a checkpoint that is complete:
//! every tensor is there with the right shape and type, and nothing that the model does not have is left over.

mod experts;
mod leftovers;

use std::collections::BTreeSet;
use std::path::Path;

use crate::checkpoint::{Checkpoint, Fp8Scales, TensorReader};
use crate::class::NumericClass;
use crate::config::{FP8_SCALE_SUFFIX, ModelConfig, Quantisation, ReadConfig, read_config};
use crate::error::{Error, Result};
use crate::safetensors::{DType, TensorFile, TensorInfo};
use crate::schema::{self, TrunkTensor};

const RESTORE: &str =
    "the checkpoint is not whole or config.json belongs to another model: download it again";

/// A checkpoint and what to do with it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) checkpoint: Checkpoint,
    /// With the expert counts of the tensors.
    pub(crate) config: ModelConfig,
    pub(crate) trunk: Vec<(TrunkTensor, Source)>,
    pub(crate) layers: Vec<LayerPlan>,
    pub(crate) warnings: Vec<String>,
}

/// The experts of one layer.
#[derive(Debug)]
pub(crate) struct LayerPlan {
    pub(crate) layer: u32,
    pub(crate) experts: Vec<ExpertSource>,
}

/// The three matrices of an expert.
#[derive(Debug)]
pub(crate) struct ExpertSource {
    pub(crate) gate: Source,
    pub(crate) up: Source,
    pub(crate) down: Source,
}

/// Consecutive rows of a checkpoint tensor.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    tensor: String,
    /// First element in the tensor; not 0 in fused tensors.
    first: u64,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Side of the blocks that share a scale, for FP8.
    fp8_block: Option<usize>,
}

impl Plan {
    /// Reads configuration and headers of a checkpoint directory and checks one against the other.
    pub(crate) fn make(directory: &Path, class: &NumericClass) -> Result<Self> {
        let ReadConfig { config, quantisation, extra_layers, warnings } = read_config(directory)?;
        let checkpoint = Checkpoint::open(directory)?;
        let mut builder = Builder {
            checkpoint: &checkpoint,
            config,
            quantisation,
            used: BTreeSet::new(),
            warnings,
        };
        builder.warnings.extend_from_slice(checkpoint.warnings());
        let found = builder.find_experts()?;
        builder.settle_config(&found)?;
        let trunk = builder.trunk(class)?;
        let layers = builder.layers(&found)?;
        builder.leftovers(extra_layers)?;
        let Builder { config, warnings, .. } = builder;
        Ok(Self { checkpoint, config, trunk, layers, warnings })
    }

    /// Opens a source for reading.
    pub(crate) fn reader<'a>(&'a self, source: &'a Source) -> Result<SourceReader<'a>> {
        let (file, info) = self.checkpoint.require(&source.tensor, RESTORE)?;
        let scales = source.fp8_block.map(|block| self.scales(source, block)).transpose()?;
        let reader = TensorReader::new(&source.tensor, file, info, scales.is_some())?;
        Ok(SourceReader { source, reader, scales })
    }

    fn scales(&self, source: &Source, block: usize) -> Result<Fp8Scales> {
        let name = format!("{}{FP8_SCALE_SUFFIX}", source.tensor);
        let (file, info) = self.checkpoint.require(&name, RESTORE)?;
        let reader = TensorReader::new(&name, file, info, false)?;
        let mut scales = vec![0.0; source.rows.div_ceil(block) * source.cols.div_ceil(block)];
        reader.read(0, &mut scales)?;
        Ok(Fp8Scales { block, scales })
    }
}

/// Reads rows of a source as f32.
#[derive(Debug)]
pub(crate) struct SourceReader<'a> {
    source: &'a Source,
    reader: TensorReader<'a>,
    scales: Option<Fp8Scales>,
}

impl SourceReader<'_> {
    /// Reads whole rows from `first_row` on.
    pub(crate) fn rows(&self, first_row: usize, out: &mut [f32]) -> Result<()> {
        let cols = self.source.cols;
        self.reader.read(self.source.first + (first_row as u64) * (cols as u64), out)?;
        if let Some(scales) = &self.scales {
            scales.apply(first_row, cols, out);
        }
        Ok(())
    }

    /// Reads all of it.
    pub(crate) fn all(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.source.rows * self.source.cols];
        self.rows(0, &mut values)?;
        Ok(values)
    }
}

struct Builder<'a> {
    checkpoint: &'a Checkpoint,
    config: ModelConfig,
    quantisation: Quantisation,
    used: BTreeSet<String>,
    warnings: Vec<String>,
}

impl Builder<'_> {
    fn trunk(&mut self, class: &NumericClass) -> Result<Vec<(TrunkTensor, Source)>> {
        self.check_head()?;
        let tensors = schema::trunk_tensors(&self.config, class);
        tensors
            .into_iter()
            .map(|tensor| {
                let name = self.source_name(&tensor.name);
                let source = match tensor.shape.as_slice() {
                    &[rows, cols] => self.matrix(&name, rows, cols)?,
                    lengths => self.vector(&name, lengths.iter().product())?,
                };
                Ok((tensor, source))
            })
            .collect()
    }

    /// The name that a canonical trunk tensor has in the checkpoint.
    fn source_name(&self, canonical: &str) -> String {
        let Some((layer, part)) =
            canonical.strip_prefix("layers.").and_then(|rest| rest.split_once('.'))
        else {
            return match canonical {
                "embed" => EMBEDDING.to_owned(),
                "head" => HEAD.to_owned(),
                _ => "model.norm.weight".to_owned(),
            };
        };
        let block = self.expert_block(layer);
        let part = match part {
            "attn_norm" => "input_layernorm.weight".to_owned(),
            "ffn_norm" => "post_attention_layernorm.weight".to_owned(),
            "q" | "k" | "v" | "o" => format!("self_attn.{part}_proj.weight"),
            "q_norm" | "k_norm" => format!("self_attn.{part}.weight"),
            "q_bias" | "k_bias" | "v_bias" | "o_bias" => {
                format!("self_attn.{}_proj.bias", &part[..1])
            }
            "router" => format!("{block}.gate.weight"),
            "router_bias" => format!("{block}.gate.e_score_correction_bias"),
            shared if shared.starts_with("shared_") => {
                format!("{block}.shared_experts.{}_proj.weight", &shared["shared_".len()..])
            }
            dense => format!("mlp.{dense}_proj.weight"),
        };
        format!("model.layers.{layer}.{part}")
    }

    /// Tied and untied heads: shared only when the configuration says so, never because a tensor happens to be absent.
    fn check_head(&mut self) -> Result<()> {
        let head = self.checkpoint.find(HEAD);
        if !self.config.tie_word_embeddings {
            let hint = "config.json does not tie it to the embedding; if this model shares the two, set \
                        tie_word_embeddings to true, otherwise the download is incomplete";
            return head.map(|_| ()).ok_or_else(|| self.checkpoint.missing(HEAD, hint));
        }
        let Some((file, info)) = head else { return Ok(()) };
        let (embed_file, embed_info) = self.checkpoint.require(EMBEDDING, RESTORE)?;
        if info.dtype != embed_info.dtype
            || info.shape != embed_info.shape
            || !same((file, info), (embed_file, embed_info))?
        {
            return Err(Error::Config {
                file: self.checkpoint.directory().join("config.json"),
                key: "tie_word_embeddings".to_owned(),
                problem: format!(
                    "is true, but {HEAD} in {} differs from {EMBEDDING}",
                    file.path().display()
                ),
                hint: "set it to false if the model has a head of its own, else remove the tensor"
                    .to_owned(),
            });
        }
        self.warnings.push(format!("{HEAD} is a copy of the embedding and is not stored again"));
        self.used.insert(HEAD.to_owned());
        Ok(())
    }

    /// A matrix, plain or FP8.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Source> {
        let (file, info) = self.require(name)?;
        let hint = "config.json and the tensors disagree: check that both belong to the same model";
        expect_shape(file, name, info, &[rows as u64, cols as u64], hint)?;
        let fp8_block = self.scale_block(name, file, info, rows, cols)?;
        TensorReader::new(name, file, info, fp8_block.is_some())?;
        self.used.insert(name.to_owned());
        if fp8_block.is_some() {
            self.used.insert(format!("{name}{FP8_SCALE_SUFFIX}"));
        }
        Ok(Source { tensor: name.to_owned(), first: 0, rows, cols, fp8_block })
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Source> {
        let (file, info) = self.require(name)?;
        let hint = "config.json and the tensors disagree: check that both belong to the same model";
        expect_shape(file, name, info, &[length as u64], hint)?;
        TensorReader::new(name, file, info, false)?;
        self.used.insert(name.to_owned());
        Ok(Source { tensor: name.to_owned(), first: 0, rows: 1, cols: length, fp8_block: None })
    }

    fn require(&self, name: &str) -> Result<(&TensorFile, &TensorInfo)> {
        self.checkpoint.require(name, RESTORE)
    }

    /// The block side of an FP8 matrix, whose scales must be there with the right shape; `None` for a plain matrix, which
    /// must not have scales.
    fn scale_block(
        &self,
        name: &str,
        file: &TensorFile,
        info: &TensorInfo,
        rows: usize,
        cols: usize,
    ) -> Result<Option<usize>> {
        let scale_name = format!("{name}{FP8_SCALE_SUFFIX}");
        let scale = self.checkpoint.find(&scale_name);
        let refuse = |detail: &str| {
            Err(Error::Quantised {
                file: file.path().to_path_buf(),
                what: format!("tensor {name}"),
                detail: detail.to_owned(),
                hint: "config.json and the tensors do not belong together: download the checkpoint again",
            })
        };
        match (info.dtype, self.quantisation, scale) {
            (DType::F8_E4M3, Quantisation::Fp8 { block }, Some((scale_file, scale_info))) => {
                let shape = [rows.div_ceil(block) as u64, cols.div_ceil(block) as u64];
                expect_shape(
                    scale_file,
                    &scale_name,
                    scale_info,
                    &shape,
                    "scales are per 128x128 block",
                )?;
                TensorReader::new(&scale_name, scale_file, scale_info, false)?;
                Ok(Some(block))
            }
            (DType::F8_E4M3, Quantisation::Fp8 { .. }, None) => Err(self
                .checkpoint
                .missing(&scale_name, "an FP8 weight cannot be read without its scales")),
            (DType::F8_E4M3, Quantisation::None, _) => {
                refuse("F8_E4M3 without a quantization_config")
            }
            (_, _, Some(_)) => refuse("scales beside weights that are not FP8"),
            (_, _, None) => Ok(None),
        }
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

fn expect_shape(
    file: &TensorFile,
    name: &str,
    info: &TensorInfo,
    expected: &[u64],
    hint: &str,
) -> Result<()> {
    if info.shape == expected {
        return Ok(());
    }
    Err(Error::Shape {
        file: file.path().to_path_buf(),
        tensor: name.to_owned(),
        expected: expected.to_vec(),
        found: info.shape.clone(),
        hint: hint.to_owned(),
    })
}

/// Compares the data of two tensors of equal length.
fn same(a: (&TensorFile, &TensorInfo), b: (&TensorFile, &TensorInfo)) -> Result<bool> {
    const PIECE: u64 = 1 << 20;
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let bytes = a.1.bytes();
    let mut at = 0;
    while at < bytes {
        let size = usize::try_from(PIECE.min(bytes - at)).expect("a piece is small");
        left.resize(size, 0);
        right.resize(size, 0);
        a.0.read(a.1, at, &mut left)?;
        b.0.read(b.1, at, &mut right)?;
        if left != right {
            return Ok(false);
        }
        at += size as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests;

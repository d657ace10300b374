//! Reads `config.json` and `generation_config.json` of a checkpoint directory.

use std::path::Path;

use serde_json::{Map, Value};

use super::value::Block;
use super::{Family, ModelConfig, Quantisation, families, quantisation};
use crate::error::{Error, Result};
use crate::files;

/// What the configuration files of a checkpoint say.
#[derive(Debug, Clone)]
pub(crate) struct ReadConfig {
    /// The normalised description. Expert counts are those of the file; the tensors have the last word.
    pub(crate) config: ModelConfig,
    /// Whether tensors are quantised.
    pub(crate) quantisation: Quantisation,
    /// Extra prediction layers (MTP) behind the decoder layers.
    pub(crate) extra_layers: usize,
    /// What a user should know: keys without effect, things that are skipped.
    pub(crate) warnings: Vec<String>,
}

/// Reads and normalises the configuration of the checkpoint in `directory`.
pub(crate) fn read_config(directory: &Path) -> Result<ReadConfig> {
    let file = directory.join("config.json");
    if !file.is_file() {
        return Err(Error::MissingFile {
            path: file,
            hint: "no default model family is assumed; copy config.json of this model next to its weights".to_owned(),
        });
    }
    let map = read_object(&file)?;
    let generation_file = directory.join("generation_config.json");
    let generation =
        if generation_file.is_file() { Some(read_object(&generation_file)?) } else { None };
    let mut read = normalise(&file, &map)?;
    if let Some(generation) = &generation {
        let block = Block::new(&generation_file, generation);
        if let Some(ids) = block.token_ids("eos_token_id")? {
            read.config.eos_token_ids = ids;
        }
    }
    check_ids(&file, &read.config)?;
    Ok(read)
}

fn read_object(file: &Path) -> Result<Map<String, Value>> {
    let bytes = files::read_small(file)?;
    serde_json::from_slice(&bytes).map_err(Error::json(file))
}

pub(super) fn normalise(file: &Path, map: &Map<String, Value>) -> Result<ReadConfig> {
    let top = Block::new(file, map);
    let Some(model_type) = top.opt_str("model_type")? else {
        return Err(top.error(
            "model_type",
            "the key is missing",
            "no default family is assumed; restore config.json from the model's publisher",
        ));
    };
    let Some(family) = Family::from_model_type(model_type) else {
        let supported = Family::ALL.map(Family::model_type).join(", ");
        return Err(Error::UnsupportedFamily {
            file: file.to_path_buf(),
            found: model_type.to_owned(),
            supported,
        });
    };
    let quantisation = quantisation::read(file, &top)?;
    let mut warnings = Vec::new();
    let (config, extra_layers) = families::normalise(family, &top, &mut warnings)?;
    Ok(ReadConfig { config, quantisation, extra_layers, warnings })
}

/// Special ids must be rows of the embedding.
fn check_ids(file: &Path, config: &ModelConfig) -> Result<()> {
    let ids = config.bos_token_ids.iter().chain(&config.eos_token_ids).chain(&config.pad_token_id);
    match ids.copied().find(|&id| usize::try_from(id).map_or(true, |id| id >= config.vocab_size)) {
        None => Ok(()),
        Some(id) => Err(Error::Config {
            file: file.to_path_buf(),
            key: "vocab_size".to_owned(),
            problem: format!(
                "special token id {id} is not below the vocabulary size {}",
                config.vocab_size
            ),
            hint: "restore config.json and generation_config.json from the model's publisher"
                .to_owned(),
        }),
    }
}

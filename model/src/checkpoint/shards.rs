//! Finds the files of a checkpoint and says exactly what is wrong when they are not all there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use super::DOWNLOAD_AGAIN;
use crate::error::{Error, Result};
use crate::files;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The files that count, in a fixed order.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) files: Vec<String>,
    pub(super) index: Option<Index>,
    pub(super) warnings: Vec<String>,
}

/// `model.safetensors.index.json`.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) name: String,
    pub(super) weight_map: BTreeMap<String, String>,
}

pub(super) fn find(directory: &Path) -> Result<Found> {
    let names = files::names(directory)?;
    let present: BTreeSet<&str> =
        names.iter().map(String::as_str).filter(|name| name.ends_with(".safetensors")).collect();
    let (counted, index) = if names.iter().any(|name| name == INDEX) {
        let index = read_index(directory)?;
        let named: BTreeSet<String> = index.weight_map.values().cloned().collect();
        check_named(directory, &index, &named, &present)?;
        (named, Some(index))
    } else if present.contains(SINGLE) {
        (BTreeSet::from([SINGLE.to_owned()]), None)
    } else {
        return Err(nothing(directory, &names, &present));
    };
    let strays: Vec<&str> =
        present.iter().copied().filter(|name| !counted.contains(*name)).collect();
    let mut warnings = Vec::new();
    if !strays.is_empty() {
        let rule =
            if index.is_some() { "the index does not name them" } else { "there is no index" };
        warnings.push(format!(
            "{} ignored, because {rule}: {}",
            plural(strays.len()),
            strays.join(", ")
        ));
    }
    Ok(Found { files: counted.into_iter().collect(), index, warnings })
}

fn plural(count: usize) -> String {
    if count == 1 {
        "1 safetensors file is".to_owned()
    } else {
        format!("{count} safetensors files are")
    }
}

fn read_index(directory: &Path) -> Result<Index> {
    #[derive(Deserialize)]
    struct File {
        weight_map: BTreeMap<String, String>,
    }
    let path = directory.join(INDEX);
    let file: File =
        serde_json::from_slice(&files::read_small(&path)?).map_err(Error::json(&path))?;
    if let Some((tensor, name)) = file.weight_map.iter().find(|(_, name)| !is_plain(name)) {
        return Err(Error::IndexMismatch {
            index: INDEX.to_owned(),
            tensor: tensor.clone(),
            file: name.clone(),
            found: "which is not the name of a safetensors file in this directory".to_owned(),
            hint: DOWNLOAD_AGAIN,
        });
    }
    if file.weight_map.is_empty() {
        let hint = "the index names no file".to_owned();
        return Err(Error::MissingFile { path, hint: format!("{hint}; {DOWNLOAD_AGAIN}") });
    }
    Ok(Index { name: INDEX.to_owned(), weight_map: file.weight_map })
}

/// A file name without directories, so that an index cannot lead elsewhere.
fn is_plain(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\\', '\0'])
}

fn check_named(
    directory: &Path,
    index: &Index,
    named: &BTreeSet<String>,
    present: &BTreeSet<&str>,
) -> Result<()> {
    let absent: Vec<String> =
        named.iter().filter(|name| !present.contains(name.as_str())).cloned().collect();
    if absent.is_empty() {
        return Ok(());
    }
    let here = named.len() - absent.len();
    let tensors = index.weight_map.values().filter(|name| present.contains(name.as_str())).count();
    let counts =
        format!("{here} files with {tensors} of {} tensors are here", index.weight_map.len());
    let diagnosis = format!("{counts}; {}", diagnose(named, present, &absent));
    let (directory, index) = (directory.to_path_buf(), index.name.clone());
    Err(Error::MissingShards { directory, index, named: named.len(), absent, diagnosis })
}

/// The numbering tells a stopped download from a lost file and from an index that belongs to other files.
fn diagnose(named: &BTreeSet<String>, present: &BTreeSet<&str>, absent: &[String]) -> String {
    let totals: BTreeSet<u64> =
        present.iter().filter_map(|name| numbering(name)).map(|(_, total)| total).collect();
    let wanted: BTreeSet<u64> =
        named.iter().filter_map(|name| numbering(name)).map(|(_, total)| total).collect();
    if let (Some(have), Some(want)) = (totals.first(), wanted.first())
        && totals.is_disjoint(&wanted)
    {
        return format!(
            "the files here are numbered of {have}, those of the index of {want}: the index belongs to another download; \
             fetch the index that belongs to these files, or all files again"
        );
    }
    let numbers = |names: &mut dyn Iterator<Item = &str>| -> Vec<u64> {
        names.filter_map(numbering).map(|(number, _)| number).collect()
    };
    let gone = numbers(&mut absent.iter().map(String::as_str));
    let here = numbers(&mut present.iter().copied().filter(|name| named.contains(*name)));
    let hint = "fetch them and try again";
    match (gone.iter().min(), here.iter().max()) {
        (Some(first), Some(last)) if first > last => {
            format!(
                "the tail is missing from number {first} on: the download stopped early; {hint}"
            )
        }
        (Some(_), Some(_)) => {
            let list: Vec<String> = gone.iter().map(u64::to_string).collect();
            format!("there is a gap in the numbering at {}; {hint}", list.join(", "))
        }
        _ => hint.to_owned(),
    }
}

/// `(3, 7)` of `model-00003-of-00007.safetensors`.
fn numbering(name: &str) -> Option<(u64, u64)> {
    let stem = name.strip_suffix(".safetensors")?;
    let (head, total) = stem.rsplit_once("-of-")?;
    let (_, number) = head.rsplit_once('-')?;
    Some((number.parse().ok()?, total.parse().ok()?))
}

/// No index and no single file: says what is there instead.
fn nothing(directory: &Path, names: &[String], present: &BTreeSet<&str>) -> Error {
    let other = |end: &str| names.iter().find(|name| name.ends_with(end));
    let hint = if let Some(first) = present.first() {
        let numbers: Vec<u64> =
            present.iter().filter_map(|name| numbering(name)).map(|(number, _)| number).collect();
        let total = numbering(first).map_or(String::new(), |(_, total)| format!(" of {total}"));
        let files = if numbers.is_empty() {
            String::new()
        } else {
            format!(" ({} numbered files{total})", numbers.len())
        };
        return Error::MissingFile {
            path: directory.join(INDEX),
            hint: format!(
                "there are safetensors files such as {first}{files} but no index that says which belong together; \
                 fetch the index of this model"
            ),
        };
    } else if let Some(name) = other(".bin").or_else(|| other(".pt")).or_else(|| other(".pth")) {
        format!(
            "{name} is a pickled checkpoint, which is not read; fetch the safetensors release of this model"
        )
    } else if let Some(name) = other(".gguf") {
        format!(
            "{name} is a GGUF file, which is not converted; fetch the safetensors release of this model"
        )
    } else {
        "there are no weights in this directory; give the directory of a Hugging Face checkpoint"
            .to_owned()
    };
    Error::MissingFile { path: directory.join(SINGLE), hint }
}

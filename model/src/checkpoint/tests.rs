//! Files and index of a checkpoint. Each test is a case that users of other programs met.

use std::fs;

use crate::testing::{
    INDEX, check_refused, check_warned, checkpoint, edit, edit_index, plan, shard, sharded,
};
use crate::tiny::{Preset, TinyOptions};

#[test]
fn a_whole_checkpoint_is_read_without_a_warning() {
    for preset in Preset::ALL {
        assert_eq!(plan(sharded(preset).path()).unwrap().warnings, Vec::<String>::new());
    }
}

#[test]
fn every_absent_shard_is_named() {
    let directory = sharded(Preset::Mixtral);
    for number in [2, 3] {
        fs::remove_file(directory.path().join(shard(number))).unwrap();
    }
    check_refused(directory.path(), &["2 of the 3 files", INDEX, &shard(2), &shard(3)]);
}

#[test]
fn a_gap_in_the_numbering_is_told_from_a_missing_tail() {
    let directory = sharded(Preset::Mixtral);
    fs::remove_file(directory.path().join(shard(2))).unwrap();
    check_refused(directory.path(), &[&shard(2), "gap in the numbering at 2", "2 files with"]);

    let directory = sharded(Preset::Mixtral);
    fs::remove_file(directory.path().join(shard(3))).unwrap();
    check_refused(
        directory.path(),
        &[&shard(3), "the tail is missing from number 3 on", "stopped early"],
    );
}

#[test]
fn a_shard_that_is_cut_short_is_refused_before_use() {
    let directory = sharded(Preset::Olmoe);
    let path = directory.path().join(shard(2));
    let length = fs::metadata(&path).unwrap().len();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 1000).unwrap();
    check_refused(directory.path(), &[&shard(2), "cut short"]);
}

#[test]
fn an_index_entry_for_the_wrong_shard_is_refused() {
    let name = "model.layers.0.self_attn.q_proj.weight";
    let directory = sharded(Preset::Qwen3Moe);
    edit_index(directory.path(), |map| {
        let wrong = if map[name] == shard(1) { shard(2) } else { shard(1) };
        map.insert(name.to_owned(), wrong.into());
    });
    check_refused(directory.path(), &[INDEX, name, "it is in model-0000"]);
}

#[test]
fn an_index_entry_that_no_header_has_is_refused() {
    let directory = sharded(Preset::Qwen3Moe);
    edit_index(directory.path(), |map| {
        map.insert("model.layers.0.extra.weight".to_owned(), shard(1).into());
    });
    check_refused(
        directory.path(),
        &["model.layers.0.extra.weight", INDEX, &shard(1), "whose header lacks it"],
    );
}

#[test]
fn the_index_does_not_veto_tensors_that_are_there() {
    let name = "model.layers.0.self_attn.q_proj.weight";
    let directory = sharded(Preset::Qwen3Moe);
    edit_index(directory.path(), |map| {
        map.remove(name);
    });
    check_warned(
        directory.path(),
        &[INDEX, "1 tensors are in the files but not in the index", name],
    );
}

#[test]
fn stray_files_are_reported_and_ignored() {
    let directory = sharded(Preset::Mixtral);
    fs::copy(directory.path().join(shard(1)), directory.path().join("copy-4bit.safetensors"))
        .unwrap();
    check_warned(
        directory.path(),
        &["1 safetensors file is ignored", "index does not name", "copy-4bit.safetensors"],
    );

    let directory = checkpoint(Preset::Mixtral, &TinyOptions::default());
    let single = directory.path().join("model.safetensors");
    fs::copy(&single, directory.path().join("consolidated.safetensors")).unwrap();
    check_warned(directory.path(), &["there is no index", "consolidated.safetensors"]);
}

#[test]
fn an_index_of_another_download_is_told_by_its_numbers() {
    let directory = sharded(Preset::Mixtral);
    edit_index(directory.path(), |map| {
        for value in map.values_mut() {
            *value = value.as_str().unwrap().replace("of-00003", "of-00030").into();
        }
    });
    check_refused(
        directory.path(),
        &["numbered of 3, those of the index of 30", "belongs to another download"],
    );
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let directory = sharded(Preset::Mixtral);
    let stolen = crate::testing::load(&directory.path().join(shard(1))).remove(0);
    let name = stolen.name.clone();
    edit(&directory.path().join(shard(2)), |tensors| tensors.push(stolen));
    check_refused(directory.path(), &[&name, &shard(1), &shard(2)]);
}

#[test]
fn a_directory_without_config_has_no_default_family() {
    let directory = sharded(Preset::Mixtral);
    fs::remove_file(directory.path().join("config.json")).unwrap();
    check_refused(directory.path(), &["config.json is missing", "no default model family"]);
}

/// Not in the index, or promised by the index and not in the header, or not in the only file: three different faults.
#[test]
fn a_missing_tensor_is_one_of_three_cases() {
    let name = "model.norm.weight";
    let directory = sharded(Preset::Mixtral);
    for number in 1..=3 {
        edit(&directory.path().join(shard(number)), |tensors| {
            tensors.retain(|tensor| tensor.name != name)
        });
    }
    check_refused(directory.path(), &[name, INDEX, "whose header lacks it"]);
    edit_index(directory.path(), |map| {
        map.remove(name);
    });
    check_refused(directory.path(), &[name, "the name is not in", INDEX]);

    let directory = checkpoint(Preset::Mixtral, &TinyOptions::default());
    edit(&directory.path().join("model.safetensors"), |tensors| {
        tensors.retain(|tensor| tensor.name != name)
    });
    check_refused(directory.path(), &[name, "the header of model.safetensors lacks it"]);
}

#[test]
fn shards_without_an_index_are_not_guessed_together() {
    let directory = sharded(Preset::Mixtral);
    fs::remove_file(directory.path().join(INDEX)).unwrap();
    check_refused(directory.path(), &[INDEX, "3 numbered files of 3", "fetch the index"]);
}

#[test]
fn other_kinds_of_files_are_named() {
    let directory = sharded(Preset::Mixtral);
    for name in [INDEX.to_owned(), shard(1), shard(2), shard(3)] {
        fs::remove_file(directory.path().join(name)).unwrap();
    }
    check_refused(directory.path(), &["there are no weights in this directory"]);
    fs::write(directory.path().join("model.gguf"), b"GGUF").unwrap();
    check_refused(directory.path(), &["model.gguf is a GGUF file"]);
    fs::write(directory.path().join("pytorch_model.bin"), b"PK").unwrap();
    check_refused(directory.path(), &["pytorch_model.bin is a pickled checkpoint"]);
}

#[test]
fn an_index_cannot_lead_out_of_its_directory() {
    let directory = sharded(Preset::Mixtral);
    edit_index(directory.path(), |map| {
        map.insert("model.norm.weight".to_owned(), "../other.safetensors".into());
    });
    check_refused(directory.path(), &["model.norm.weight", "../other.safetensors"]);
}

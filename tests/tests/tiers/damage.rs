//! Experts' files that change under a worker that has them open.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
};

use serde_json::Value;
use shimmer_model::Container;
use shimmer_tests::cluster::Cluster;

use super::{Bench, Seen, count, slots, tiers};

/// Damages every experts' file of the container, of which the worker may have a mirror, after it has opened them. When
/// the files are whole again, so is the engine.
fn check(
    damage: impl Fn(&Container, u32, &File),
    mirrored: bool,
    seen: &Seen<'_>,
    counted: impl Fn(&Value),
) {
    let bench = Bench::new();
    let container = Container::open(&bench.container()).unwrap();
    let layers: Vec<u32> = container.config().moe_layers().map(|(layer, _)| layer).collect();
    for io in ["pread", "uring", "buffered"] {
        let cluster = Cluster::start(&bench.options(io, mirrored, None));
        let before = slots(&cluster);
        let whole: Vec<_> = layers
            .iter()
            .map(|&layer| {
                let path = container.expert_file(layer).unwrap().1;
                let whole = (path, fs::read(path).unwrap());
                damage(&container, layer, &open(path));
                whole
            })
            .collect();
        bench.check_seen(&cluster, seen);
        assert_eq!(slots(&cluster), before);
        counted(&tiers(&cluster));
        for (path, bytes) in whole {
            open(path).write_all_at(&bytes, 0).unwrap();
        }
        bench.check_same(&cluster, "when the files are whole again");
        assert_eq!(slots(&cluster), before);
    }
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// One bit of every slab but those that the worker has read and compared for its self-test: in each layer with experts the
/// one of the layer's number.
fn flip(container: &Container, layer: u32, file: &File) {
    let tested = container.config().moe_layers().position(|(other, _)| other == layer).unwrap();
    for expert in (0..container.config().experts(layer)).filter(|&e| e as usize != tested) {
        let at = container.expert_entry(layer, expert).unwrap().offset + 77;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
}

/// The end is gone, from the middle of the first slab on.
fn cut(container: &Container, layer: u32, file: &File) {
    let first = container.expert_entry(layer, 0).unwrap();
    file.set_len(first.offset + first.bytes / 2).unwrap();
}

#[test]
fn a_flipped_bit_on_one_drive_is_read_from_the_other() {
    check(flip, true, &Seen::Bytes, |tiers| {
        assert!(count(tiers, "slabs_damaged") > 0 && count(tiers, "mirror_fallbacks") > 0);
    });
}

#[test]
fn a_flipped_bit_on_the_only_drive_is_named_and_never_computed_with() {
    let parts = ["reading expert ", " of layer ", "layer-0", "they are damaged"];
    check(flip, false, &Seen::Error(&parts), |tiers| assert!(count(tiers, "slabs_damaged") > 0));
}

#[test]
fn a_file_that_is_cut_while_a_worker_has_it_open_is_read_from_the_other_drive() {
    check(cut, true, &Seen::Bytes, |tiers| assert!(count(tiers, "mirror_fallbacks") > 0));
}

#[test]
fn a_file_that_is_cut_while_a_worker_has_it_open_is_named() {
    let parts = ["reading expert ", " of layer ", "layer-0", "the file ends inside the slab"];
    check(cut, false, &Seen::Error(&parts), |_| {});
}

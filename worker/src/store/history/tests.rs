use std::path::Path;

use crate::{
    history,
    store::{ExpertStore as _, testing::Bench},
    tier_options::{TierOptions, UsageFile},
};

fn bench(path: &Path, read_only: bool) -> Bench {
    let usage = Some(UsageFile { path: path.to_owned(), read_only });
    Bench::new(1000, TierOptions { cap: Some(3), usage, ..TierOptions::default() })
}

/// Uses of the first experts of a layer, as the file has them.
fn uses(path: &Path, bench: &Bench, layer: u32) -> Option<Vec<u64>> {
    let usage = history::load(path, bench.container.digest()).unwrap()?;
    Some((0..4).map(|expert| usage.of(layer, expert)).collect())
}

#[test]
fn what_was_used_is_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    let (one, two) = (bench(&path, false), bench(&path, false));
    let layer = one.layers[0];
    let _claims = [one.claim(1, 12), two.claim(1, 12)];
    one.store.save_usage();
    assert_eq!(uses(&path, &one, layer), None, "nothing was used");
    one.run(layer, &[0, 1]).unwrap();
    one.store.save_usage();
    one.store.save_usage();
    assert_eq!(uses(&path, &one, layer), Some(vec![1, 1, 0, 0]));
    // Another store of the process adds its own.
    two.run(layer, &[1, 3]).unwrap();
    one.run(layer, &[1]).unwrap();
    two.store.save_usage();
    let container = one.container.clone();
    drop(one);
    let usage = history::load(&path, container.digest()).unwrap().unwrap();
    let of = |expert| usage.of(layer, expert);
    // What came before has faded a little, and fractions are rounded down.
    assert!(of(0) <= 1 && (1..=3).contains(&of(1)) && of(3) <= 1, "{usage:?}");
    assert_eq!(usage.of(two.layers[1], 0), 0);
}

#[test]
fn a_history_may_be_left_alone_or_fail() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("usage");
    let reader = bench(&path, true);
    let layer = reader.layers[0];
    let _claim = reader.claim(1, 12);
    reader.run(layer, &[0, 1]).unwrap();
    reader.store.save_usage();
    assert!(!path.exists(), "read-only");

    let gone = dir.path().join("gone");
    std::fs::create_dir(&gone).unwrap();
    let path = gone.join("usage");
    let writer = bench(&path, false);
    let _claim = writer.claim(1, 12);
    std::fs::remove_dir(&gone).unwrap();
    writer.run(layer, &[0, 1]).unwrap();
    writer.store.save_usage();
    assert_eq!(writer.store.snapshot().usage_save_failures, 1);
    // It serves on, and nothing that was used is forgotten.
    writer.run(layer, &[2]).unwrap();
    std::fs::create_dir(&gone).unwrap();
    writer.store.save_usage();
    assert_eq!(uses(&path, &writer, layer), Some(vec![1, 1, 1, 0]));
}

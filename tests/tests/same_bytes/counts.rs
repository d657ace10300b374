//! Any number of worker processes, up to the documented limit.
//!
//! `SHIMMER_TEST_WORKER_COUNTS=1..=32` runs other counts than these, one cluster after the other.

use std::{env, time::Instant};

use shimmer_proto::limits::MAX_WORKERS;
use shimmer_tests::cluster::{Cluster, ClusterOptions};

use super::{VOCABULARY, assert_same, default_class, odd_model, plainest, processes::outcomes};
use shimmer_tests::workload::mixed;

/// One, more than a layer has experts, and the limit. Two and three are tested beside this.
const COUNTS: [usize; 4] = [1, 5, 16, MAX_WORKERS];

fn counts() -> Vec<usize> {
    let Ok(text) = env::var("SHIMMER_TEST_WORKER_COUNTS") else { return COUNTS.to_vec() };
    let bounds =
        text.split_once("..=").and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    let (from, to): (usize, usize) = bounds.expect("SHIMMER_TEST_WORKER_COUNTS is FROM..=TO");
    (from..=to).collect()
}

#[test]
fn any_number_of_worker_processes_up_to_the_limit() {
    let model = odd_model();
    let container = model.container(default_class());
    let jobs = mixed(VOCABULARY);
    let expected = plainest(&container, &jobs);
    for count in counts() {
        let begun = Instant::now();
        let cluster = Cluster::start(&ClusterOptions::new(&container, count));
        let started = begun.elapsed();
        assert_same(&format!("{count} workers"), &outcomes(&cluster, &jobs, true), &expected);
        println!(
            "{count} workers: serving after {started:.1?}, answered after {:.1?}",
            begun.elapsed()
        );
    }
}

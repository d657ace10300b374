use proptest::prelude::*;

use super::*;
use crate::{
    heat::HeatMap,
    placement::{Candidate, PlacementInput},
};

const LAYERS: [PlacedLayer; 3] = [
    PlacedLayer { layer: 1, experts: 4, slab_bytes: 10 },
    PlacedLayer { layer: 2, experts: 0, slab_bytes: 0 },
    PlacedLayer { layer: 4, experts: 2, slab_bytes: 10 },
];

fn ids(workers: usize) -> Vec<String> {
    // Not in the order of the alphabet.
    (0..workers).rev().map(|worker| format!("w{worker:02}")).collect()
}

fn header() -> RecordHeader {
    RecordHeader {
        generation: 7,
        container_digest: "41aa".to_owned(),
        leader: "c1".to_owned(),
        leader_revision: 12,
        reason: "test".to_owned(),
    }
}

fn placed(workers: usize, copies: usize) -> Placement {
    let named = |id| Candidate { id, weight: 1.0, ..Candidate::default() };
    let candidates: Vec<_> = ids(workers).into_iter().map(named).collect();
    let heat = HeatMap::default();
    let input = PlacementInput { layers: &LAYERS, candidates: &candidates, copies, heat: &heat };
    Placement::plan(&input).unwrap()
}

fn check(change: impl FnOnce(&mut PlacementRecord), expected: &str) {
    let mut record = placed(3, 2).to_record(&ids(3), header());
    change(&mut record);
    let error = Placement::from_record(&record, "41aa", &LAYERS).unwrap_err();
    assert_eq!(error.to_string(), expected);
}

#[test]
fn hostile_records_are_refused_by_name() {
    check(|r| r.generation = 0, "placement: generation 0, expected 1 or more");
    check(
        |r| r.container_digest = "9f3c".to_owned(),
        "placement of generation 7 is for container 9f3c, expected 41aa",
    );
    check(|r| r.workers.clear(), "placement: 0 workers, expected 1 to 64");
    check(
        |r| r.workers = (0..65).map(|w| format!("w{w:02}")).collect(),
        "placement: 65 workers, expected 1 to 64",
    );
    let name = "is empty, longer than 64 bytes or not above the one before it";
    check(|r| r.workers[0].clear(), &format!("placement: worker id (none) {name}"));
    check(|r| r.workers.swap(0, 1), &format!("placement: worker id w00 {name}"));
    check(|r| r.workers[1] = "w00".to_owned(), &format!("placement: worker id w00 {name}"));
    check(
        |r| r.workers[2] = "x".repeat(65),
        &format!("placement: worker id {} {name}", "x".repeat(65)),
    );
    check(|r| r.layers[1].layer = 3, "placement: layer 3 stands where layer 4 is expected");
    check(
        |r| drop(r.layers.pop()),
        "placement: the end of the layers stands where layer 4 is expected",
    );
    check(
        |r| r.layers.push(LayerRecord { layer: 9, copies: Vec::new() }),
        "placement: layer 9 stands where the end of the layers is expected",
    );
    check(|r| drop(r.layers[0].copies.pop()), "placement: layer 1 has 3 experts, expected 4");
    check(
        |r| r.layers[0].copies[2].clear(),
        "placement: expert 2 of layer 1 has 0 copies, expected 1 to 8",
    );
    check(
        |r| r.layers[0].copies[2] = (0..9).collect(),
        "placement: expert 2 of layer 1 has 9 copies, expected 1 to 8",
    );
    check(
        |r| r.layers[1].copies[1] = vec![0, 3],
        "placement: expert 1 of layer 4 is placed on worker 3 of 3",
    );
    check(
        |r| r.layers[1].copies[1] = vec![2, 0, 2],
        "placement: expert 1 of layer 4 is placed twice on worker 2",
    );
}

proptest! {
    #[test]
    fn a_record_is_read_as_it_was_written(workers in 1..=MAX_WORKERS, copies in 1..=MAX_COPIES) {
        let placed = placed(workers, copies);
        let record = placed.to_record(&ids(workers), header());
        let text = serde_json::to_string(&record).unwrap();
        let record: PlacementRecord = serde_json::from_str(&text).unwrap();
        let read = Placement::from_record(&record, "41aa", &LAYERS).unwrap();
        // The record's workers are ascending, ours were descending.
        let seats: Vec<usize> = (0..workers).rev().collect();
        prop_assert_eq!(read, placed.reseated(&seats, workers));
    }

    /// Whatever stands in a record, reading it gives a placement that can be used or a refusal.
    #[test]
    fn no_record_panics(
        workers in prop::collection::vec("[a-c]{0,2}", 0..4),
        layers in prop::collection::vec(
            (0..6_u32, prop::collection::vec(prop::collection::vec(0..5_u16, 0..10), 0..5)),
            0..4,
        ),
    ) {
        let layers = layers.into_iter().map(|(layer, copies)| LayerRecord { layer, copies });
        let record = PlacementRecord {
            generation: 1,
            container_digest: "41aa".to_owned(),
            leader: String::new(),
            leader_revision: 0,
            reason: String::new(),
            workers,
            layers: layers.collect(),
        };
        if let Ok(placement) = Placement::from_record(&record, "41aa", &LAYERS) {
            for (_, _, copies) in placement.experts() {
                prop_assert!(copies.iter().all(|&copy| copy < record.workers.len()));
            }
        }
    }
}

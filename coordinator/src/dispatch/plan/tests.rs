use shimmer_kernels::gating::{GatingRule, Score};
use shimmer_kernels::{Isa, Kernels, WeightFormat};
use shimmer_model::tiny::Preset;

use super::*;
use crate::test_support::{TestWorkers, tiny_model};

const HIDDEN: usize = 64;

/// Plans random rows over workers of the given weights, then checks every message against what the rows chose.
fn check(weights: &[f64], rows: usize, max_rows: usize, failed: &[usize]) {
    let kernels = Kernels::new(Some(Isa::Scalar)).unwrap();
    let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let workers = TestWorkers::new(&tiny, kernels, weights).limits(max_rows, 1 << 20);
    let mut faults = RowFaults::default();
    faults.reset(rows);
    for &row in failed {
        faults.fail(row, RowFault::Unavailable { detail: String::new() });
    }
    let rule = GatingRule {
        score: Score::Softmax,
        top_k: 4,
        groups: 1,
        groups_kept: 1,
        normalise: true,
        normalise_eps: 0.0,
        scale: 1.0,
    };
    let scores: Vec<f32> = (0..rows * 16).map(|i| ((i * 7919 + 13) % 101) as f32 * 0.1).collect();
    let mut choices = Choices::default();
    choices.choose(&rule, &scores, 16, None, 1, &mut faults);
    let x: Vec<f32> = (0..rows * HIDDEN).map(|i| ((i * 31) % 255) as f32 - 127.0).collect();
    let mut activations = ActivationRows::new();
    activations.set(&kernels, ActivationFormat::A8G64, &x, rows, HIDDEN);

    let mut plan = Plan::default();
    let mut recipients = Recipients::default();
    recipients.begin(&workers, true, std::time::Instant::now());
    plan.build(&workers, &mut recipients, 1, &choices, [1, rows], &mut faults);
    let mut seen: Vec<(u32, u32, f32)> = Vec::new();
    for part in 0..plan.parts.len() {
        let work = plan.message(part, Fence::default(), &activations, 5);
        assert!((1..=max_rows).contains(&(work.row_count as usize)));
        assert!(work.experts.is_sorted_by(|a, b| a < b), "{:?}", work.experts);
        assert_eq!(work.item_rows.iter().sum::<u32>() as usize, work.row_indices.len());
        assert_eq!(work.gates.len(), work.row_indices.len());
        let batch_rows = plan.rows(part).to_vec();
        let mut picked = Vec::new();
        activations.write_wire_rows(&batch_rows, &mut picked);
        assert_eq!(work.rows, picked);
        let mut at = 0;
        for (&expert, &count) in work.experts.iter().zip(&work.item_rows) {
            let owner = workers.owner(1, expert).map(Recipient::Worker);
            assert_eq!(owner, Some(plan.parts[part].to));
            for index in at..at + count as usize {
                seen.push((
                    batch_rows[work.row_indices[index] as usize],
                    expert,
                    work.gates[index],
                ));
            }
            at += count as usize;
        }
    }
    let mut wanted: Vec<(u32, u32, f32)> = (0..rows)
        .filter(|row| !failed.contains(row))
        .flat_map(|row| {
            choices.of(row).iter().map(move |s| (u32::try_from(row).unwrap(), s.expert, s.weight))
        })
        .collect();
    let order = |a: &(u32, u32, f32), b: &(u32, u32, f32)| (a.0, a.1).cmp(&(b.0, b.1));
    seen.sort_by(order);
    wanted.sort_by(order);
    assert_eq!(seen, wanted);
}

#[test]
fn every_choice_is_sent_once_to_its_owner() {
    check(&[1.0], 1, 4096, &[]);
    check(&[1.0], 40, 4096, &[]);
    check(&[1.0, 3.0], 40, 7, &[]);
    check(&[1.0; 5], 33, 1, &[]);
    check(&[1.0; 40], 9, 4096, &[]);
    check(&[1.0, 1.0], 10, 3, &[0, 4, 9]);
    check(&[1.0], 3, 4096, &[0, 1, 2]);
}

#[test]
fn rows_taken_out_keep_the_others() {
    let mut plan = Plan {
        parts: vec![Part::new(Recipient::Worker(0), 0..3, 0..4)],
        rows: vec![10, 11, 12],
        entries: [(0, 5), (2, 5), (1, 6), (2, 7)]
            .map(|(row, expert)| Entry { row, expert, gate: 1.0 })
            .to_vec(),
        ..Plan::default()
    };
    plan.without(0, &[1]);
    assert_eq!((plan.rows(0), plan.parts[0].attempt), (&[10, 12][..], 1));
    let left: Vec<_> = plan.entries(0).iter().map(|entry| (entry.row, entry.expert)).collect();
    assert_eq!(left, [(0, 5), (1, 5), (1, 7)]);
    plan.without(0, &[0, 1]);
    assert!(plan.rows(0).is_empty() && plan.entries(0).is_empty());
}

use shimmer_kernels::gating::{GatingRule, Score};

use super::*;

const EXPERTS: usize = 6;

/// Choices of two experts per row, best first.
fn choices(rows: &[[u32; 2]]) -> Choices {
    let rule = GatingRule {
        score: Score::Softmax,
        top_k: 2,
        groups: 1,
        groups_kept: 1,
        normalise: true,
        normalise_eps: 0.0,
        scale: 1.0,
    };
    let mut logits = vec![0.0; rows.len() * EXPERTS];
    for (row, [best, second]) in rows.iter().enumerate() {
        logits[row * EXPERTS + *best as usize] = 2.0;
        logits[row * EXPERTS + *second as usize] = 1.0;
    }
    let mut choices = Choices::default();
    choices.choose(&rule, &logits, EXPERTS, None, 0, &mut faults(rows.len(), &[]));
    choices
}

fn faults(rows: usize, failed: &[usize]) -> RowFaults {
    let mut faults = RowFaults::default();
    faults.reset(rows);
    for &row in failed {
        let detail = "by the test".to_owned();
        faults.fail(row, crate::gating::RowFault::Unavailable { detail });
    }
    faults
}

fn check_ranking(rows: &[[u32; 2]], skipped: &[usize], most: usize, expected: &[u32]) {
    let mut ranking = Ranking::default();
    ranking.rank(&choices(rows), rows.len(), &faults(rows.len(), skipped), EXPERTS, most);
    assert_eq!(ranking.experts(), expected, "{rows:?}");
}

#[test]
fn predictions_are_ranked_by_rank_then_row() {
    check_ranking(&[[4, 1]], &[], 64, &[4, 1]);
    check_ranking(&[[4, 1], [2, 4], [2, 0]], &[], 64, &[4, 2, 1, 0]);
    check_ranking(&[[4, 1], [2, 4], [2, 0]], &[], 3, &[4, 2, 1]);
    check_ranking(&[[4, 1], [2, 4], [2, 0]], &[0], 64, &[2, 4, 0]);
    check_ranking(&[[4, 1]], &[0], 64, &[]);
}

fn overlap(predicted: u64, chosen: u64, hits: u64) -> Overlap {
    Overlap { predicted, chosen, hits }
}

#[test]
fn recall_is_counted_by_row_by_step_and_against_the_token_before() {
    let mut meter = RecallMeter::default();
    assert_eq!(meter.recall().rows.recall(), None, "unknown is not zero");
    let span = |first_position, rows| AttentionSpan { pages: &[7], first_position, rows };
    let mut step = |first, guessed: &[[u32; 2]], chosen: &[[u32; 2]], failed: &[usize]| {
        meter.begin(&[span(first, chosen.len())], 3);
        let (guess, skipped) = (choices(guessed), faults(guessed.len(), &[]));
        let mut ranking = Ranking::default();
        ranking.rank(&guess, guessed.len(), &skipped, EXPERTS, 64);
        let predicted = Predicted {
            choices: &guess,
            rows: guessed.len(),
            skipped: &skipped,
            ranking: &ranking,
        };
        let faults = faults(chosen.len(), failed);
        meter.measure(2, &choices(chosen), &faults, Some(predicted));
        meter.recall()
    };
    // A prompt of three rows of which two were predicted. Each row but the first has a token before it.
    let recall = step(0, &[[0, 1], [2, 3]], &[[0, 1], [0, 3], [5, 4]], &[]);
    assert_eq!(recall.rows, overlap(4, 4, 3));
    assert_eq!(recall.steps, overlap(4, 5, 3));
    assert_eq!(recall.previous, overlap(2, 2, 1));
    // The next token of the same sequence: its predecessor chose 5 and 4.
    let recall = step(3, &[[1, 2]], &[[4, 1]], &[]);
    assert_eq!(recall.rows, overlap(6, 6, 4));
    assert_eq!(recall.steps, overlap(6, 7, 4));
    assert_eq!(recall.previous, overlap(4, 4, 2));
    // A row that failed counts nowhere; neither does a position that does not follow.
    let recall = step(9, &[[1, 2], [0, 1]], &[[2, 1], [0, 1]], &[1]);
    assert_eq!(recall.rows, overlap(8, 8, 6));
    assert_eq!(recall.steps, overlap(9, 9, 6));
    assert_eq!(recall.previous, overlap(4, 4, 2));
    assert_eq!(recall.rows.recall(), Some(0.75));
}

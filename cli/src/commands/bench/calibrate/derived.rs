//! What follows from the figures of one round.

use super::{LONG, PROMPTS, STEPS, median::Samples};
use crate::forecast::{Costs, Curve};

/// Experts that the small cache misses, by point: in a decode step, and in the step of each prompt.
pub(super) type Misses = Vec<f64>;

/// What is the same in every round.
#[derive(Debug)]
pub(super) struct Machine<'a> {
    /// Digest.
    pub(super) container: &'a str,
    pub(super) threads: usize,
    /// Layers with experts.
    pub(super) layers: u32,
    pub(super) misses: &'a Misses,
}

/// The costs of a round. Differences of noisy figures can be below nothing; costs cannot.
pub(super) fn of_round(samples: &Samples, machine: &Machine<'_>) -> Costs {
    let m = |name: &str| samples.median(name);
    let [short, full] = [PROMPTS[0], PROMPTS[PROMPTS.len() - 1]];
    // Rows of the points, and the names of the steps inside one process.
    let rows: Vec<u32> = [1].into_iter().chain(PROMPTS).collect();
    let mut steps = vec![format!("1 after {short}")];
    steps.extend(PROMPTS.iter().map(|rows| format!("{rows} at 0")));
    let far = m(&format!("trunk 1 after {LONG}")) - m(&format!("trunk {}", steps[0]));
    let attention_decode_s = (far / f64::from(LONG - short)).max(0.0);
    let before = LONG - full;
    let late = m(&format!("trunk {full} at {before}")) - m(&format!("trunk {full} at 0"));
    let curve = |seconds: &dyn Fn(usize, u32) -> f64| Curve {
        rows: rows.iter().copied().map(f64::from).collect(),
        seconds: rows.iter().enumerate().map(|(at, rows)| seconds(at, *rows).max(0.0)).collect(),
    };
    let seen = attention_decode_s * (f64::from(short) + f64::from(STEPS) / 2.0);
    let trunk =
        curve(&|at, _| m(&format!("trunk {}", steps[at])) - if at == 0 { seen } else { 0.0 });
    let expert = Curve::through(
        steps.iter().map(|name| (m(&format!("rows {name}")), m(&format!("expert {name}")))),
    );
    let layers = f64::from(machine.layers);
    // All of it, so that trunk, experts and one message are what one worker's cluster takes.
    let message =
        curve(&|at, rows| (m(&format!("one {rows}")) - m(&format!("step {}", steps[at]))) / layers);
    let message_more =
        curve(&|_, rows| (m(&format!("two {rows}")) - m(&format!("one {rows}"))) / layers);
    let reading: Vec<(f64, f64)> = rows
        .iter()
        .zip(machine.misses)
        .filter(|(_, misses)| **misses > 0.0)
        .map(|(rows, misses)| {
            let added = m(&format!("read {rows}")) - m(&format!("one {rows}"));
            (f64::from(*rows), added / misses)
        })
        .collect();
    // A cache that misses nothing says nothing about reading.
    let read =
        if reading.is_empty() { Curve::always(0.0) } else { Curve::through(reading.into_iter()) };
    Costs {
        container: machine.container.to_owned(),
        threads: machine.threads,
        attention_decode_s,
        attention_prefill_s: (late / f64::from(full * before)).max(0.0),
        trunk,
        expert,
        message,
        message_more,
        read,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: u32 = 10;
    const MISSES: [f64; 4] = [2.0, 40.0, 50.0, 0.0];
    /// Seconds, by point: trunk, experts of a step, one worker's messages, the second worker's, and the reads.
    const MADE: [[f64; 5]; 4] = [
        [1.0, 0.5, 0.2, 0.1, 0.4],
        [4.0, 2.0, 0.3, 0.2, 2.0],
        [9.0, 6.0, 0.5, -0.2, 2.0],
        [30.0, 20.0, 2.0, 0.4, 0.0],
    ];
    /// Attention to a position, of a decode step and of one of 256 rows.
    const ATTENTION: [f64; 2] = [0.001, 0.02];

    /// What a machine of these costs takes for the requests of a round.
    fn taken() -> Samples {
        let mut samples = Samples::default();
        let mut inside = |name: &str, trunk: f64, experts: f64, rows: f64| {
            samples.add(&format!("step {name}"), trunk + experts);
            samples.add(&format!("trunk {name}"), trunk);
            samples.add(&format!("expert {name}"), experts / 20.0);
            samples.add(&format!("rows {name}"), rows);
        };
        let decode = |prompt: u32| MADE[0][0] + ATTENTION[0] * f64::from(prompt + STEPS / 2);
        let names = ["1 after 16", "16 at 0", "64 at 0", "256 at 0"];
        for (at, name) in names.into_iter().enumerate() {
            let trunk = if at == 0 { decode(16) } else { MADE[at][0] };
            inside(name, trunk, MADE[at][1], [1.0, 3.0, 11.0, 43.0][at]);
        }
        inside("1 after 768", decode(768), MADE[0][1], 1.0);
        inside("256 at 512", MADE[3][0] + ATTENTION[1] * 512.0, MADE[3][1], 43.0);
        for (at, rows) in [1, 16, 64, 256].into_iter().enumerate() {
            let [trunk, experts, one, two, read] = MADE[at];
            let trunk = if at == 0 { decode(16) } else { trunk };
            samples.add(&format!("one {rows}"), trunk + experts + one);
            samples.add(&format!("two {rows}"), trunk + experts + one + two);
            samples.add(&format!("read {rows}"), trunk + experts + one + read);
        }
        samples
    }

    fn close(found: &[f64], expected: &[f64]) {
        let near = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-9;
        assert_eq!(found.len(), expected.len(), "{found:?}");
        assert!(found.iter().zip(expected).all(near), "{found:?} instead of {expected:?}");
    }

    #[test]
    fn a_round_gives_the_costs_that_it_was_made_of() {
        let misses = MISSES.to_vec();
        let machine = Machine { container: "c", threads: 2, layers: LAYERS, misses: &misses };
        let costs = of_round(&taken(), &machine);
        close(&[costs.attention_decode_s, costs.attention_prefill_s], &[0.001, 0.02 / 256.0]);
        close(&costs.trunk.rows, &[1.0, 16.0, 64.0, 256.0]);
        close(&costs.trunk.seconds, &[1.0, 4.0, 9.0, 30.0]);
        close(&costs.expert.rows, &[1.0, 3.0, 11.0, 43.0]);
        close(&costs.expert.seconds, &[0.025, 0.1, 0.3, 1.0]);
        close(&costs.message.seconds, &[0.02, 0.03, 0.05, 0.2]);
        // A second worker that saves time costs nothing.
        close(&costs.message_more.seconds, &[0.01, 0.02, 0.0, 0.04]);
        // Where nothing was missed, nothing is known of reading.
        close(&costs.read.rows, &[1.0, 16.0, 64.0]);
        close(&costs.read.seconds, &[0.2, 0.05, 0.04]);
    }

    #[test]
    fn a_cache_that_misses_nothing_reads_for_nothing() {
        let misses = vec![0.0; 4];
        let machine = Machine { container: "c", threads: 2, layers: LAYERS, misses: &misses };
        close(&[of_round(&taken(), &machine).read.at(16.0)], &[0.0]);
    }
}

//! Rotary position tables, made once in f64 with the pure-Rust `libm` and rounded to f32.

/// Cosines and sines of every position and frequency.
#[derive(Debug, Clone)]
pub struct RopeTable {
    rotary_dim: usize,
    positions: usize,
    /// Per position: `rotary_dim / 2` cosines, then as many sines.
    values: Vec<f32>,
}

impl RopeTable {
    /// Angles `position * theta^(-2 i / rotary_dim)` for positions below `positions`. `rotary_dim` is even.
    pub fn new(theta: f64, rotary_dim: usize, positions: usize) -> Self {
        assert!(
            rotary_dim.is_multiple_of(2),
            "rotation works on pairs, not on {rotary_dim} dimensions"
        );
        let half = rotary_dim / 2;
        let mut values = Vec::with_capacity(positions * rotary_dim);
        #[expect(
            clippy::cast_precision_loss,
            reason = "dimensions and positions are far below 2^53"
        )]
        let frequencies: Vec<f64> =
            (0..half).map(|i| libm::pow(theta, -((2 * i) as f64) / rotary_dim as f64)).collect();
        for position in 0..positions {
            #[expect(clippy::cast_precision_loss, reason = "positions are far below 2^53")]
            let position = position as f64;
            #[expect(clippy::cast_possible_truncation, reason = "the one rounding to f32")]
            let mut extend = |f: fn(f64) -> f64| {
                values.extend(frequencies.iter().map(|w| f(position * w) as f32))
            };
            extend(libm::cos);
            extend(libm::sin);
        }
        Self { rotary_dim, positions, values }
    }

    /// Dimensions that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// Positions in the table.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// The cosines and sines of one position.
    pub(crate) fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let begin = position * self.rotary_dim;
        self.values[begin..begin + self.rotary_dim].split_at(self.rotary_dim / 2)
    }
}

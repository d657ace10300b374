//! The formulas of single operations, in f64.

#![expect(
    clippy::disallowed_methods,
    reason = "a reference within bounds may use the platform's functions"
)]

/// A row-major matrix; vectors are matrices of one row.
#[derive(Debug, Clone)]
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub values: Vec<f64>,
}

impl Matrix {
    /// One row.
    pub fn row(&self, index: usize) -> &[f64] {
        &self.values[index * self.cols..][..self.cols]
    }

    /// The matrix times a vector.
    pub fn apply(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.cols, "a matrix of {} columns takes as many values", self.cols);
        (0..self.rows).map(|row| dot(self.row(row), x)).collect()
    }
}

/// Sum of the products.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `x / sqrt(mean(x^2) + eps) * weight`.
pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    assert_eq!(x.len(), weight.len(), "a norm weight has one value per element");
    let mean = dot(x, x) / count(x.len());
    x.iter().zip(weight).map(|(x, weight)| x / (mean + eps).sqrt() * weight).collect()
}

/// `1 / (1 + e^-x)`.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// Probabilities in proportion to `e^x`.
pub fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

/// Rotates the first `rotary` elements of one head; element i is paired with element i + rotary / 2.
pub fn rope(head: &mut [f64], rotary: usize, theta: f64, position: usize) {
    let half = rotary / 2;
    for i in 0..half {
        let angle = count(position) * theta.powf(-2.0 * count(i) / count(rotary));
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * angle.cos() - b * angle.sin();
        head[i + half] = b * angle.cos() + a * angle.sin();
    }
}

/// Causal attention of one query over the positions before it and its own: keys and values are those of one head.
pub fn attention(query: &[f64], keys: &[&[f64]], values: &[&[f64]]) -> Vec<f64> {
    let scale = count(query.len()).sqrt().recip();
    let scores: Vec<f64> = keys.iter().map(|key| dot(query, key) * scale).collect();
    let mut out = vec![0.0; values[0].len()];
    for (weight, value) in softmax(&scores).iter().zip(values) {
        for (out, value) in out.iter_mut().zip(*value) {
            *out += weight * value;
        }
    }
    out
}

/// `down(silu(gate x) * up x)`.
pub fn swiglu_ffn(gate: &Matrix, up: &Matrix, down: &Matrix, x: &[f64]) -> Vec<f64> {
    let inner: Vec<f64> =
        gate.apply(x).iter().zip(up.apply(x)).map(|(gate, up)| silu(*gate) * up).collect();
    down.apply(&inner)
}

/// `a += b`.
pub fn add(a: &mut [f64], b: &[f64]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

/// A count as a number; counts of tests are far below 2^53.
#[expect(clippy::cast_precision_loss, reason = "counts of tests are far below 2^53")]
pub fn count(n: usize) -> f64 {
    n as f64
}

//! Grouped-query attention of the four families.

use super::{Family, Model, ops};

impl Model {
    /// Adds one layer's attention to the residual rows.
    pub(super) fn attention(&self, layer: &str, hidden: &mut [Vec<f64>]) {
        let heads = self.number("num_attention_heads");
        let kv_heads = self.number("num_key_value_heads");
        let head_dim =
            self.optional_number("head_dim").unwrap_or(self.number("hidden_size") / heads);
        let at = format!("{layer}.self_attn");
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (position, row) in hidden.iter().enumerate() {
            let x = self.norm(&format!("{layer}.input_layernorm.weight"), row);
            queries.push(self.rotated(&at, "q", &x, head_dim, position));
            keys.push(self.rotated(&at, "k", &x, head_dim, position));
            values.push(self.projected(&at, "v", &x));
        }
        for (position, row) in hidden.iter_mut().enumerate() {
            let mut joined = Vec::with_capacity(heads * head_dim);
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads) * head_dim;
                let of_head = |rows: &'_ [Vec<f64>]| -> Vec<Vec<f64>> {
                    rows[..=position]
                        .iter()
                        .map(|row| row[kv_head..kv_head + head_dim].to_vec())
                        .collect()
                };
                let (keys, values) = (of_head(&keys), of_head(&values));
                let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
                joined.extend(ops::attention(
                    &queries[position][head * head_dim..][..head_dim],
                    &keys,
                    &values,
                ));
            }
            ops::add(row, &self.projected(&at, "o", &joined));
        }
    }

    /// Queries or keys: projected, normalised where the family does it, rotated.
    fn rotated(
        &self,
        at: &str,
        name: &str,
        x: &[f64],
        head_dim: usize,
        position: usize,
    ) -> Vec<f64> {
        let mut row = self.projected(at, name, x);
        let norm = format!("{at}.{name}_norm.weight");
        if self.optional(&norm).is_some() {
            // OLMoE normalises the whole projection, the others each head.
            let width = if self.family == Family::Olmoe { row.len() } else { head_dim };
            row = row.chunks_exact(width).flat_map(|part| self.norm(&norm, part)).collect();
        }
        let theta = self.rope_setting("rope_theta").expect("the configuration has a rope theta");
        let share = self.rope_setting("partial_rotary_factor").unwrap_or(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a part of the head dimension"
        )]
        let rotary = (ops::count(head_dim) * share) as usize;
        for head in row.chunks_exact_mut(head_dim) {
            ops::rope(head, rotary, theta, position);
        }
        row
    }

    fn projected(&self, at: &str, name: &str, x: &[f64]) -> Vec<f64> {
        let mut row = self.tensor(&format!("{at}.{name}_proj.weight")).apply(x);
        if let Some(bias) = self.optional(&format!("{at}.{name}_proj.bias")) {
            ops::add(&mut row, &bias.values);
        }
        row
    }
}

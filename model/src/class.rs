//! The numeric class: which formats the numbers of a container have. Part of its identity, since it decides bytes.

use std::fmt;

use serde::{Deserialize, Serialize};
use shimmer_kernels::{ActivationFormat, KvFormat, WeightFormat};

/// Formats by kind of matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericClass {
    /// Routed experts.
    pub experts: WeightFormat,
    /// Attention, dense and shared MLPs, untied embedding.
    pub trunk: WeightFormat,
    /// Output head; also the embedding where the two are tied.
    pub head: WeightFormat,
    /// Key-value cache.
    pub kv: KvFormat,
}

impl Default for NumericClass {
    /// 4-bit experts, because they are the bulk; 8 bits in the trunk, because 4 there ruin models that 4 in the experts
    /// do not; an exact cache.
    fn default() -> Self {
        Self {
            experts: WeightFormat::Q4G64,
            trunk: WeightFormat::Q8G64,
            head: WeightFormat::Q8G64,
            kv: KvFormat::F32,
        }
    }
}

impl NumericClass {
    /// All weights in one format, exact cache.
    #[must_use]
    pub fn uniform(format: WeightFormat) -> Self {
        Self { experts: format, trunk: format, head: format, kv: KvFormat::F32 }
    }

    /// What expert inputs are quantised to, also on the wire.
    #[must_use]
    pub fn expert_activations(&self) -> ActivationFormat {
        if self.experts.is_integer() { ActivationFormat::A8G64 } else { ActivationFormat::F32 }
    }

    /// What inputs of trunk matrices are quantised to.
    #[must_use]
    pub fn trunk_activations(&self) -> ActivationFormat {
        wide(self.trunk)
    }

    /// What the input of the head is quantised to.
    #[must_use]
    pub fn head_activations(&self) -> ActivationFormat {
        wide(self.head)
    }
}

/// Trunk inputs carry outliers that 8 bits per group of 64 lose, so they take the 16-bit form.
fn wide(format: WeightFormat) -> ActivationFormat {
    if format.is_integer() { ActivationFormat::A16G64 } else { ActivationFormat::F32 }
}

impl fmt::Display for NumericClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { experts, trunk, head, kv } = self;
        let (of_experts, of_trunk, of_head) =
            (self.expert_activations(), self.trunk_activations(), self.head_activations());
        write!(
            f,
            "experts={experts}/{of_experts} trunk={trunk}/{of_trunk} head={head}/{of_head} kv={kv}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(class: NumericClass, expected: &str) {
        assert_eq!(class.to_string(), expected);
    }

    #[test]
    fn displays_weights_and_activations() {
        check(
            NumericClass::default(),
            "experts=q4g64/a8g64 trunk=q8g64/a16g64 head=q8g64/a16g64 kv=f32",
        );
        check(
            NumericClass::uniform(WeightFormat::Bf16),
            "experts=bf16/f32 trunk=bf16/f32 head=bf16/f32 kv=f32",
        );
    }
}

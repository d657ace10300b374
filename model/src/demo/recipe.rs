//! What cannot be derived from the source: neurons of each expert, routers, correction biases.

use std::path::Path;

use half::bf16;

use super::{EXPERT_WIDTH, EXPERTS, HIDDEN, WIDTH};
use crate::error::{Error, Result};
use crate::safetensors::{DType, Header, parse_bytes};

/// Factor on the down projection of routed experts.
pub(super) const GAIN: f32 = 0.25;

const BYTES: &[u8] = include_bytes!("../../demo/recipe.safetensors");
const PLACE: &str = "demo/recipe.safetensors";

/// The recipe, in memory.
#[derive(Debug)]
pub(super) struct Recipe {
    header: Header,
    data: &'static [u8],
}

impl Recipe {
    pub(super) fn load() -> Result<Self> {
        let (header, data) = parse_bytes(Path::new(PLACE), BYTES)?;
        Ok(Self { header, data })
    }

    fn bytes(
        &self,
        layer: usize,
        part: &str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<&'static [u8]> {
        let name = format!("layers.{layer}.{part}");
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        let found =
            self.header.get(&name).filter(|info| info.dtype == dtype && info.shape == shape);
        let bytes = found.and_then(|info| {
            let start = usize::try_from(info.start()).ok()?;
            self.data.get(start..start.checked_add(usize::try_from(info.bytes()).ok()?)?)
        });
        bytes.ok_or_else(|| Error::DemoSource {
            file: PLACE.into(),
            problem: format!("tensor {name} is not {dtype} {shape:?}"),
            hint: "this build is damaged",
        })
    }

    /// Neurons of an expert: rows of gate and up, columns of down.
    pub(super) fn neurons(&self, layer: usize, expert: usize) -> Result<Vec<usize>> {
        let bytes = self.bytes(layer, "neurons", DType::I16, &[EXPERTS, EXPERT_WIDTH])?;
        let of_expert =
            bytes.as_chunks::<2>().0.iter().skip(expert * EXPERT_WIDTH).take(EXPERT_WIDTH);
        of_expert
            .map(|&b| {
                let neuron =
                    usize::try_from(i16::from_le_bytes(b)).ok().filter(|&neuron| neuron < WIDTH);
                neuron.ok_or_else(|| Error::DemoSource {
                    file: PLACE.into(),
                    problem: format!("a neuron of expert {expert} of layer {layer} does not exist"),
                    hint: "this build is damaged",
                })
            })
            .collect()
    }

    pub(super) fn router(&self, layer: usize) -> Result<Vec<f32>> {
        let bytes = self.bytes(layer, "router", DType::BF16, &[EXPERTS, HIDDEN])?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect())
    }

    pub(super) fn router_bias(&self, layer: usize) -> Result<Vec<f32>> {
        let bytes = self.bytes(layer, "router_bias", DType::F32, &[EXPERTS])?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }
}

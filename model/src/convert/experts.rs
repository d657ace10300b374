//! The expert files: one per layer, one slab per expert, each with its digest and the digest of its self-test.

use rayon::prelude::*;
use shimmer_kernels::{Expert, ExpertLayout, ExpertScratch, Isa, Kernels, pack_expert};

use super::{Job, Unit};
use crate::error::{Error, Result};
use crate::manifest::{ExpertEntry, FileEntry};
use crate::plan::{ExpertSource, LayerPlan};
use crate::safetensors::{DType, HeaderEntry, TensorWriter};
use crate::{schema, self_test};

/// Memory for experts that are packed at the same time, as f32.
const BATCH_BYTES: usize = 1 << 30;

fn layout(job: &Job<'_>, plan: &LayerPlan) -> Result<ExpertLayout> {
    let layout = schema::expert_layout(&job.plan.config, &job.options.class, plan.layer)?;
    Ok(layout.expect("the plan has layers with experts only"))
}

/// Bytes of the data.
pub(super) fn bytes(job: &Job<'_>, plan: &LayerPlan) -> Result<u64> {
    Ok(layout(job, plan)?.slab_bytes() as u64 * plan.experts.len() as u64)
}

pub(super) fn write(job: &Job<'_>, name: &str, plan: &LayerPlan) -> Result<Unit> {
    let layout = layout(job, plan)?;
    let slab_bytes = layout.slab_bytes() as u64;
    let header: Vec<HeaderEntry> = (0u32..)
        .zip(&plan.experts)
        .map(|(expert, _)| HeaderEntry {
            name: schema::expert_name(plan.layer, expert),
            dtype: DType::U8,
            shape: vec![slab_bytes],
        })
        .collect();
    let mut output = TensorWriter::create(&job.options.out.join(name), &header)?;
    let values = 3 * layout.hidden() * layout.intermediate();
    let batch = (BATCH_BYTES / 4 / values).clamp(1, 2 * rayon::current_num_threads());
    let mut experts = Vec::with_capacity(plan.experts.len());
    for sources in plan.experts.chunks(batch) {
        job.check_stop()?;
        let first = experts.len();
        let packed: Vec<Packed> = sources
            .par_iter()
            .enumerate()
            .map(|(index, source)| pack(job, &layout, plan.layer, first + index, source))
            .collect::<Result<_>>()?;
        for packed in packed {
            let offset = output.at();
            output.write(&packed.slab)?;
            job.progress.advance(slab_bytes);
            experts.push(ExpertEntry {
                layer: plan.layer,
                expert: u32::try_from(experts.len()).expect("the number of experts is limited"),
                file: name.to_owned(),
                offset,
                bytes: slab_bytes,
                blake3: packed.digest.to_hex().to_string(),
                self_test: hex::encode(packed.self_test),
            });
        }
    }
    Ok(Unit { entry: FileEntry::of(name, output.finish()?), tensors: Vec::new(), experts })
}

struct Packed {
    slab: Vec<u8>,
    digest: blake3::Hash,
    self_test: [u8; 16],
}

fn pack(
    job: &Job<'_>,
    layout: &ExpertLayout,
    layer: u32,
    expert: usize,
    source: &ExpertSource,
) -> Result<Packed> {
    let fault = || Error::layout(format!("expert {expert} of layer {layer}"));
    let read = |part| job.plan.reader(part)?.all();
    let (gate, up, down) = (read(&source.gate)?, read(&source.up)?, read(&source.down)?);
    let mut slab = vec![0; layout.slab_bytes()];
    pack_expert(layout, &gate, &up, &down, &mut slab).map_err(fault())?;
    let view = Expert::from_slab(layout, &slab).map_err(fault())?;
    // Every instruction set gives the same bytes; the best one is only faster.
    let kernels =
        Kernels::new(Some(Isa::detect())).expect("the detected instruction set can be run");
    let activations = job.options.class.expert_activations();
    let self_test =
        self_test::run(&kernels, layout, &view, activations, &mut ExpertScratch::default());
    let digest = blake3::hash(&slab);
    Ok(Packed { slab, digest, self_test })
}

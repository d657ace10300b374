//! Memory for the outputs of works, shared by all connections.
//!
//! The budget of a worker prices the outputs of one work of the largest size. Coordinators that ask at the same time take
//! turns beyond that: they share the processors anyway, and small works fit beside each other.

use shimmer_proto::expert::v1::ExpertWork;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::expert_core::ExpertCore;

/// Bytes of one permit.
const UNIT: usize = 1024;

/// How much of the priced memory is free.
#[derive(Debug)]
pub(super) struct WorkRoom {
    units: u32,
    free: Semaphore,
}

impl WorkRoom {
    /// Room for one work of the largest size.
    pub(super) fn of(core: &ExpertCore) -> Self {
        let units = units(core.largest_output_bytes());
        Self { units, free: Semaphore::new(units as usize) }
    }

    /// Waits until the outputs of a work fit beside those of others; a work that is larger than all of it, until it is alone.
    pub(super) async fn wait(&self, core: &ExpertCore, work: &ExpertWork) -> SemaphorePermit<'_> {
        let bytes = core.output_bytes(work.row_count as usize, work.row_indices.len());
        let wanted = units(bytes).min(self.units);
        self.free.acquire_many(wanted).await.expect("the semaphore is never closed")
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT).max(1)).unwrap_or(u32::MAX >> 4)
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future as _,
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use shimmer_kernels::{Kernels, WeightFormat};
    use shimmer_model::tiny::Preset;

    use super::*;
    use crate::{TierOptions, WorkerConfig, testing};

    #[test]
    fn large_works_take_turns_and_small_ones_do_not() {
        let (_files, container) = testing::container(Preset::Qwen3Moe, WeightFormat::Q4G64);
        let config = WorkerConfig {
            id: "room".to_owned(),
            host: String::new(),
            coordinators: 8,
            weight: 1.0,
            tiers: TierOptions::default(),
            threads: 1,
            pool: None,
            build: "test".to_owned(),
        };
        let core = ExpertCore::new(container, Kernels::new(None).unwrap(), config).unwrap();
        let room = WorkRoom::of(&core);
        let large = ExpertWork { row_count: 1 << 20, ..ExpertWork::default() };
        let small = ExpertWork { row_count: 1, ..ExpertWork::default() };
        let mut context = Context::from_waker(Waker::noop());
        let mut ready = |work: &ExpertWork| {
            let waiting = pin!(room.wait(&core, work));
            match waiting.poll(&mut context) {
                Poll::Ready(permit) => Some(permit),
                Poll::Pending => None,
            }
        };
        let first = ready(&small).expect("nothing runs");
        let second = ready(&small).expect("there is room for both");
        assert!(ready(&large).is_none(), "a work above the price waits until it is alone");
        drop((first, second));
        let alone = ready(&large).expect("it is alone");
        assert!(ready(&small).is_none());
        drop(alone);
        assert!(ready(&small).is_some());
    }
}

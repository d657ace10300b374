//! Compute threads, each kept on the processors of one node.

#![expect(unsafe_code, reason = "affinity masks of threads")]

use std::{io, num::NonZeroUsize, sync::Arc};

use super::topology::{Node, Topology};
use crate::tier_options::NumaSetting;

/// Which processors each compute thread may run on. Without entries threads run where the process may run.
///
/// Threads alternate between the nodes, so that the blocks of rows into which an expert is cut spread over all of them,
/// whatever the number of threads. A thread is free among the processors of its node: two workers on one host, or anything
/// else that runs there, would otherwise fight for the first cores.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ThreadPlacement {
    cpus: Vec<Vec<u32>>,
}

impl ThreadPlacement {
    /// Places `threads` threads. On one node, or switched off, nothing is placed.
    pub fn decide(setting: NumaSetting, topology: &Topology, threads: usize) -> Self {
        if setting == NumaSetting::Off || !topology.is_numa() {
            return Self::default();
        }
        let nodes = topology.nodes();
        let mut placed = vec![0_usize; nodes.len()];
        let of_thread: Vec<usize> = (0..threads)
            .map(|_| {
                // The node with the fewest threads for its cores; the first of equals.
                let load = |at: &usize| (placed[*at] + 1) * 1000 / nodes[*at].cores.len().max(1);
                let at = (0..nodes.len()).min_by_key(load).expect("at least two nodes");
                placed[at] += 1;
                at
            })
            .collect();
        let cpus = of_thread.iter().map(|&at| cpus_for(&nodes[at], placed[at])).collect();
        Self { cpus }
    }

    /// The processors of a thread; none if it may run anywhere.
    pub fn cpus(&self, thread: usize) -> &[u32] {
        self.cpus.get(thread).map_or(&[], Vec::as_slice)
    }

    /// A pool whose threads are placed. The calling thread stays as it is.
    pub fn start_pool(
        &self,
        threads: usize,
        name: &'static str,
    ) -> Result<rayon::ThreadPool, rayon::ThreadPoolBuildError> {
        let builder = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |index| format!("{name}-{index}"));
        match self.handler() {
            Some(place) => builder.start_handler(move |index| place(index)).build(),
            None => builder.build(),
        }
    }

    /// Places the thread that calls it, by its number in a pool; none if threads may run anywhere.
    pub fn handler(&self) -> Option<Arc<dyn Fn(usize) + Send + Sync>> {
        if self.cpus.is_empty() {
            return None;
        }
        let placement = self.clone();
        Some(Arc::new(move |index| {
            let cpus = placement.cpus(index);
            if let Err(error) = keep_on(cpus) {
                tracing::warn!(%error, index, ?cpus, "a compute thread is not kept on its node");
            }
        }))
    }
}

/// Compute threads of a machine: one for each processor that this process may use, or for each core where threads are kept on
/// nodes. The second hardware thread of a core reads no more weights than the first.
pub fn default_threads() -> usize {
    let topology = Topology::detect();
    if topology.is_numa() {
        return topology.cores();
    }
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// One hardware thread of each core; all of them if there are more threads than cores.
fn cpus_for(node: &Node, threads: usize) -> Vec<u32> {
    let each = if threads <= node.cores.len() { 1 } else { usize::MAX };
    let mut cpus: Vec<u32> =
        node.cores.iter().flat_map(|core| core.cpus.iter().take(each)).copied().collect();
    cpus.sort_unstable();
    cpus
}

/// Keeps the calling thread on some processors.
fn keep_on(cpus: &[u32]) -> io::Result<()> {
    let bits = libc::c_ulong::BITS;
    let words = cpus.iter().max().map_or(1, |last| last / bits + 1) as usize;
    let mut mask: Vec<libc::c_ulong> = vec![0; words];
    for cpu in cpus {
        mask[(cpu / bits) as usize] |= 1 << (cpu % bits);
    }
    // SAFETY: the mask has the size that the call says; 0 is the calling thread.
    let result =
        unsafe { libc::sched_setaffinity(0, size_of_val(&mask[..]), mask.as_ptr().cast()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests;

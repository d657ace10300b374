use std::{
    ptr::NonNull,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use shimmer_kernels::Arena;

use super::*;
use crate::memory::{
    MemoryOptions, MemorySnapshot, SlotAllocator,
    topology::{Core, Node, TopologySource},
};

/// Answers every trial in the same way and counts them.
#[derive(Debug)]
struct Answering {
    error: Option<i32>,
    trials: AtomicUsize,
}

impl System for Answering {
    fn interleave(&self, arena: &Arena, _nodes: &[u32]) -> io::Result<()> {
        assert!(arena.start().addr().get().is_multiple_of(page_bytes()));
        self.trials.fetch_add(1, Relaxed);
        self.error.map_or(Ok(()), |error| Err(io::Error::from_raw_os_error(error)))
    }

    fn locate(&self, _addresses: &[usize]) -> io::Result<Vec<libc::c_int>> {
        unreachable!("a trial asks for nothing")
    }

    fn lock(&self, _start: NonNull<u8>, _bytes: usize) -> io::Result<()> {
        unreachable!("a trial locks nothing")
    }
}

fn machine(nodes: &[u32]) -> Topology {
    let node = |id: &u32| Node { id: *id, cores: vec![Core { cpus: vec![*id] }] };
    Topology::new(nodes.iter().map(node).collect(), TopologySource::Sysfs)
}

/// Decides for a machine whose system answers with `error`; how often it was asked.
fn check(
    setting: NumaSetting,
    nodes: &[u32],
    error: Option<i32>,
    expected: Result<&MemoryPlacement, &str>,
    trials: usize,
) {
    let system = Answering { error, trials: AtomicUsize::new(0) };
    let found = MemoryPlacement::decide_with(setting, &machine(nodes), &system);
    match (found, expected) {
        (Ok(found), Ok(expected)) => assert_eq!(&found, expected),
        (Err(found), Err(text)) => assert!(found.to_string().contains(text), "{found}"),
        (found, _) => panic!("{found:?}"),
    }
    assert_eq!(system.trials.load(Relaxed), trials);
}

#[test]
fn several_nodes_are_tried_out_once() {
    let both = MemoryPlacement::Interleaved(NodeSet { ids: vec![0, 3] });
    check(NumaSetting::Auto, &[3, 0], None, Ok(&both), 1);
    check(NumaSetting::Off, &[0, 3], None, Ok(&MemoryPlacement::System), 0);
}

#[test]
fn on_one_node_the_system_is_never_asked() {
    check(NumaSetting::Auto, &[1], Some(libc::EINVAL), Ok(&MemoryPlacement::System), 0);
    check(NumaSetting::Auto, &[], Some(libc::EINVAL), Ok(&MemoryPlacement::System), 0);
}

#[test]
fn missing_permission_degrades_and_anything_else_is_a_bug() {
    for error in [libc::EPERM, libc::ENOSYS] {
        check(NumaSetting::Auto, &[0, 1], Some(error), Ok(&MemoryPlacement::Refused), 1);
    }
    for error in [libc::EINVAL, libc::EFAULT, libc::ENOMEM] {
        check(NumaSetting::Auto, &[0, 1], Some(error), Err("nodes [0, 1]"), 1);
    }
}

/// The kernel is asked with an address and a length that it takes; on a machine with one node that is all there is to see.
#[test]
fn the_trial_is_one_that_this_kernel_understands() {
    let detected = Topology::detect();
    let Some(node) = detected.nodes().first() else { return };
    let arena = Arena::new(page_bytes()).unwrap();
    match Kernel.interleave(&arena, &[node.id]).map_err(|error| error.raw_os_error()) {
        Ok(()) | Err(Some(libc::EPERM | libc::ENOSYS)) => {}
        Err(error) => panic!("{error:?}"),
    }
}

fn allocator(nodes: &[u32], system: Box<dyn System>) -> SlotAllocator {
    let placement = MemoryPlacement::Interleaved(NodeSet { ids: nodes.to_vec() });
    SlotAllocator::with_system(MemoryOptions { placement, ..MemoryOptions::default() }, system)
}

#[test]
fn a_mapping_that_cannot_be_placed_is_not_kept() {
    let system = Answering { error: Some(libc::EINVAL), trials: AtomicUsize::new(0) };
    let allocator = allocator(&[0, 1], Box::new(system));
    assert_eq!(allocator.map_slots(4096, 2).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    let expected = MemorySnapshot { interleaved_nodes: 2, ..MemorySnapshot::default() };
    assert_eq!(allocator.snapshot(), expected);
}

#[test]
fn a_survey_finds_touched_pages_only() {
    let detected = Topology::detect();
    let Some(node) = detected.nodes().first() else { return };
    if Kernel.interleave(&Arena::new(page_bytes()).unwrap(), &[node.id]).is_err() {
        return;
    }
    let allocator = allocator(&[node.id], Box::new(Kernel));
    let mut slots = allocator.map_slots(3 << 20, 8).unwrap();
    assert_eq!(allocator.survey().pages.len(), 0);
    slots.iter_mut().for_each(|slot| slot.fill(1));
    let survey = allocator.survey();
    let pages = 24 * (1 << 20) / page_bytes() as u64;
    let found = survey.pages.get(&node.id).copied().unwrap_or(0);
    assert!(found.abs_diff(pages) <= pages / 8 && survey.off_node_pages == 0, "{survey:?}");
    assert!(survey.huge_bytes <= 24 << 20, "{survey:?}");
    assert_eq!(allocator.recent_survey(), survey);
    drop(slots);
    assert_eq!(allocator.survey().huge_bytes, 0);
    assert_eq!(allocator.recent_survey(), survey, "a recent one is not made again");
}

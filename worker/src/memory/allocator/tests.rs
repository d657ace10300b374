use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
    sync::Mutex,
};

use shimmer_kernels::Arena;

use super::*;
use crate::memory::{ReleasedSlot, registration::tests::Recorder};

/// A kernel that refuses some calls.
#[derive(Debug, Default)]
struct Refusing {
    /// Maps that are granted.
    maps: Option<usize>,
    /// Locks that are granted.
    locks: Option<usize>,
    /// Maps and locks that were asked for.
    calls: Arc<Mutex<(usize, usize)>>,
}

impl System for Refusing {
    fn interleave(&self, _arena: &Arena, _nodes: &[u32]) -> io::Result<()> {
        panic!("nobody asked for nodes")
    }

    fn locate(&self, _addresses: &[usize]) -> io::Result<Vec<libc::c_int>> {
        panic!("nobody asked for nodes")
    }

    fn map(&self, bytes: usize) -> io::Result<Arena> {
        let maps = &mut self.calls.lock().unwrap().0;
        *maps += 1;
        if self.maps.is_some_and(|granted| *maps > granted) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        Arena::new(bytes)
    }

    fn lock(&self, start: NonNull<u8>, bytes: usize) -> io::Result<()> {
        let locks = &mut self.calls.lock().unwrap().1;
        *locks += 1;
        if self.locks.is_some_and(|granted| *locks > granted) {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        Kernel.lock(start, bytes)
    }
}

/// How many mappings are granted from now on.
#[derive(Debug, Clone, Default)]
pub(crate) struct Granted(Arc<Mutex<usize>>);

impl Granted {
    pub(crate) fn set(&self, mappings: usize) {
        *self.0.lock().unwrap() = mappings;
    }
}

impl System for Granted {
    fn interleave(&self, _arena: &Arena, _nodes: &[u32]) -> io::Result<()> {
        panic!("nobody asked for nodes")
    }

    fn locate(&self, _addresses: &[usize]) -> io::Result<Vec<libc::c_int>> {
        panic!("nobody asked for nodes")
    }

    fn map(&self, bytes: usize) -> io::Result<Arena> {
        let mut granted = self.0.lock().unwrap();
        *granted = granted.checked_sub(1).ok_or(io::ErrorKind::OutOfMemory)?;
        Arena::new(bytes)
    }

    fn lock(&self, _start: NonNull<u8>, _bytes: usize) -> io::Result<()> {
        panic!("nobody asked for locks")
    }
}

/// An allocator that maps what is granted.
pub(crate) fn map_granted(granted: &Granted) -> SlotAllocator {
    SlotAllocator::with_system(MemoryOptions::default(), Box::new(granted.clone()))
}

/// An allocator whose device refuses one registration. The function tells how many slots the device knows.
pub(crate) fn with_refusing_device(call: usize) -> (impl Fn() -> usize, SlotAllocator) {
    let (recorder, options) = with_device(Recorder::refusing(call));
    (move || recorder.known(), SlotAllocator::new(options))
}

const LOCKED: fn() -> MemoryOptions = || MemoryOptions { lock: true, ..MemoryOptions::default() };

fn with_device(recorder: Recorder) -> (Arc<Recorder>, MemoryOptions) {
    let recorder = Arc::new(recorder);
    let device: Arc<dyn DeviceRegistration> = Arc::clone(&recorder) as _;
    (recorder, MemoryOptions { device: Some(device), ..MemoryOptions::default() })
}

/// Nothing is mapped, locked or registered any more.
fn check_empty(allocator: &SlotAllocator) {
    let MemorySnapshot { slots_released, slots_attached, .. } = allocator.snapshot();
    let empty = MemorySnapshot { slots_released, slots_attached, ..MemorySnapshot::default() };
    assert_eq!(allocator.snapshot(), empty);
}

/// Lines of /proc/self/maps that overlap what is mapped for the slots.
fn mappings_of(slots: &[SlotMemory]) -> usize {
    let spans: Vec<_> = slots
        .iter()
        .map(|slot| slot.as_ptr_range())
        .map(|r| (r.start.addr(), r.end.addr()))
        .collect();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().map(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let address = |text| usize::from_str_radix(text, 16).unwrap();
        (address(start), address(end))
    });
    ranges.filter(|(start, end)| spans.iter().any(|span| span.0 < *end && *start < span.1)).count()
}

#[test]
fn what_is_mapped_is_counted_until_the_last_slot_goes() {
    let allocator = SlotAllocator::new(MemoryOptions::default());
    let mut slots = allocator.map_slots(8192, 3).unwrap();
    let other = allocator.clone().map_slots(3 << 20, 1).unwrap();
    let expected =
        MemorySnapshot { mappings: 2, mapped_bytes: 6 << 20, ..MemorySnapshot::default() };
    assert_eq!(allocator.snapshot(), expected);
    drop(other);
    slots.truncate(1);
    let released: Vec<_> = slots.into_iter().map(SlotMemory::release).collect();
    assert_eq!(allocator.snapshot().mappings, 1);
    drop(released.into_iter().map(ReleasedSlot::attach).collect::<Vec<_>>());
    check_empty(&allocator);
    let MemorySnapshot { slots_released, slots_attached, .. } = allocator.snapshot();
    assert_eq!((slots_released, slots_attached), (1, 1));
}

/// 76 layers of 256 experts, as many as a model of 744B parameters has. Nothing is touched, so nothing is taken.
#[test]
fn all_slots_of_a_large_model_are_few_mappings() {
    let allocator = SlotAllocator::new(MemoryOptions::default());
    let slots: Vec<_> = (0..76).flat_map(|_| allocator.map_slots(20 << 20, 256).unwrap()).collect();
    assert_eq!(slots.len(), 19_456);
    assert_eq!(allocator.snapshot().mappings, 76);
    let ends: Vec<_> = slots.into_iter().step_by(128).collect();
    assert!((1..=76).contains(&mappings_of(&ends)), "{}", mappings_of(&ends));
}

#[test]
fn releasing_slots_makes_no_mappings() {
    let allocator = SlotAllocator::new(MemoryOptions::default());
    let mut slots = allocator.map_slots(8192, 200).unwrap();
    slots.iter_mut().for_each(|slot| slot.fill(1));
    let before = mappings_of(&slots);
    let released: Vec<_> = (0..100).rev().map(|index| slots.remove(2 * index).release()).collect();
    assert_eq!(mappings_of(&slots), before);
    slots.extend(released.into_iter().map(ReleasedSlot::attach));
    assert_eq!(mappings_of(&slots), before);
    drop(slots);
    check_empty(&allocator);
}

#[test]
fn locked_slots_are_locked_and_can_be_released() {
    let allocator = SlotAllocator::new(LOCKED());
    let mut slots = allocator.map_slots(64 << 10, 4).unwrap();
    let locked = allocator.snapshot().locked_bytes;
    assert!(locked == 2 << 20 || locked == 0, "the limit of locked memory may be lower: {locked}");
    slots.iter_mut().for_each(|slot| slot.fill(5));
    let again = slots.remove(2).release().attach();
    assert!(again.iter().all(|byte| *byte == 0));
    assert!(slots.iter().all(|slot| slot.iter().all(|byte| *byte == 5)));
    assert_eq!(allocator.snapshot().locked_bytes, locked);
    drop((slots, again));
    check_empty(&allocator);
}

#[test]
fn a_refused_lock_leaves_plain_memory_and_is_not_asked_for_again() {
    let calls = Arc::default();
    let refusing = Refusing { locks: Some(1), calls: Arc::clone(&calls), ..Refusing::default() };
    let allocator = SlotAllocator::with_system(LOCKED(), Box::new(refusing));
    let mut mappings: Vec<_> = (0..4).map(|_| allocator.map_slots(4096, 2).unwrap()).collect();
    mappings.iter_mut().flatten().for_each(|slot| slot.fill(3));
    assert_eq!(calls.lock().unwrap().1, 2);
    assert!(allocator.snapshot().locked_bytes <= 2 << 20);
    drop(mappings);
    check_empty(&allocator);
}

#[test]
fn a_map_that_is_refused_midway_leaves_nothing_behind() {
    let (recorder, options) = with_device(Recorder::default());
    let options = MemoryOptions { lock: true, ..options };
    let refusing = Refusing { maps: Some(3), ..Refusing::default() };
    let allocator = SlotAllocator::with_system(options, Box::new(refusing));
    let load = || (0..5).map(|_| allocator.map_slots(4096, 4)).collect::<io::Result<Vec<_>>>();
    assert_eq!(load().unwrap_err().raw_os_error(), Some(libc::ENOMEM));
    check_empty(&allocator);
    assert_eq!((recorder.calls().len(), recorder.known()), (12, 0));
}

#[test]
fn a_refused_registration_undoes_its_mapping_and_is_not_asked_for_again() {
    let (recorder, options) = with_device(Recorder::refusing(7));
    let allocator = SlotAllocator::new(options);
    let mappings: Vec<_> = (0..4).map(|_| allocator.map_slots(4096, 4).unwrap()).collect();
    let registered: Vec<_> =
        mappings.iter().map(|slots| slots.iter().filter(|s| s.is_registered()).count()).collect();
    assert_eq!(registered, [4, 0, 0, 0]);
    assert_eq!((recorder.calls().len(), recorder.known()), (7, 4));
    assert_eq!(allocator.snapshot().registered_bytes, 4 * 4096);
    drop(mappings);
    assert_eq!(recorder.known(), 0);
    check_empty(&allocator);
}

#[test]
fn a_driver_that_panics_leaves_nothing_behind() {
    let (recorder, options) = with_device(Recorder::panicking(3));
    let allocator = SlotAllocator::new(options);
    assert!(catch_unwind(AssertUnwindSafe(|| allocator.map_slots(4096, 4))).is_err());
    assert_eq!(recorder.known(), 0);
    check_empty(&allocator);
}

#[test]
fn a_device_forgets_a_slot_before_its_pages_go() {
    let (recorder, options) = with_device(Recorder::default());
    let allocator = SlotAllocator::new(options);
    let mut slots = allocator.map_slots(4096, 3).unwrap();
    let released = slots.remove(1).release();
    assert_eq!(recorder.known(), 2);
    let attached = released.attach();
    assert!(attached.is_registered());
    assert_eq!(recorder.known(), 3);
    drop(slots);
    assert_eq!(recorder.known(), 1);
    drop(attached);
    assert_eq!(recorder.known(), 0);
    check_empty(&allocator);
}

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Mutex,
};

use super::*;

/// Records what it knows, checks that the memory is there, and refuses or panics at one call.
#[derive(Debug, Default)]
pub(in crate::memory) struct Recorder {
    known: Mutex<Vec<DeviceRange>>,
    calls: Mutex<Vec<usize>>,
    refuse_at: Option<usize>,
    panic_at: Option<usize>,
}

impl Recorder {
    pub(in crate::memory) fn refusing(call: usize) -> Self {
        Self { refuse_at: Some(call), ..Self::default() }
    }

    pub(in crate::memory) fn panicking(call: usize) -> Self {
        Self { panic_at: Some(call), ..Self::default() }
    }

    /// Ranges that were registered and not unregistered.
    pub(in crate::memory) fn known(&self) -> usize {
        self.known.lock().unwrap().len()
    }

    /// Sizes of all registrations that were tried.
    pub(in crate::memory) fn calls(&self) -> Vec<usize> {
        self.calls.lock().unwrap().clone()
    }
}

/// Whether all of a range is mapped.
fn is_mapped(range: DeviceRange) -> bool {
    let mut pages = vec![0_u8; range.bytes().div_ceil(4096)];
    // SAFETY: the vector has a byte for each page.
    unsafe { libc::mincore(range.start().as_ptr().cast(), range.bytes(), pages.as_mut_ptr()) == 0 }
}

impl DeviceRegistration for Recorder {
    fn register(&self, range: DeviceRange) -> Result<(), RegistrationError> {
        let call = {
            let mut calls = self.calls.lock().unwrap();
            calls.push(range.bytes());
            calls.len()
        };
        assert!(is_mapped(range), "registered before it is mapped");
        assert_ne!(Some(call), self.panic_at, "a driver that panics");
        if Some(call) == self.refuse_at {
            return Err(RegistrationError { message: "no more memory can be pinned".to_owned() });
        }
        self.known.lock().unwrap().push(range);
        Ok(())
    }

    fn unregister(&self, range: DeviceRange) -> Result<(), RegistrationError> {
        assert!(is_mapped(range), "unregistered after it was unmapped");
        let mut known = self.known.lock().unwrap();
        let at = known.iter().position(|other| *other == range).expect("known to the device");
        known.swap_remove(at);
        Ok(())
    }
}

const PAGE: usize = 4096;

/// Registers 10 pages in pieces of 4; what the device knew meanwhile and knows afterwards, in pieces and in bytes.
fn check(recorder: Recorder, expected: Result<(usize, u64), &str>) {
    let recorder = Arc::new(recorder);
    let device: Arc<dyn DeviceRegistration> = Arc::clone(&recorder) as _;
    let total = Arc::default();
    let arena = shimmer_kernels::Arena::new(10 * PAGE).unwrap();
    let run = || Registered::in_pieces(&device, &total, arena.start(), 10 * PAGE, 4 * PAGE);
    let meanwhile = || (recorder.known(), total.load(Relaxed));
    match (catch_unwind(AssertUnwindSafe(run)), expected) {
        (Ok(Ok(_registered)), Ok(expected)) => assert_eq!(meanwhile(), expected),
        (Ok(Err(error)), Err(text)) => assert!(error.to_string().contains(text)),
        (Err(_panic), Err(text)) => assert_eq!(text, "panic"),
        (outcome, _) => panic!("{outcome:?}"),
    }
    assert_eq!(meanwhile(), (0, 0));
}

#[test]
fn long_ranges_are_registered_in_pieces() {
    check(Recorder::default(), Ok((3, 10 * PAGE as u64)));
}

#[test]
fn what_was_registered_before_a_failure_is_unregistered() {
    for call in 1..=3 {
        check(Recorder::refusing(call), Err("no more memory can be pinned"));
        check(Recorder::panicking(call), Err("panic"));
    }
}

#[test]
fn no_call_registers_more_than_a_gibibyte() {
    let recorder = Arc::new(Recorder::default());
    let device: Arc<dyn DeviceRegistration> = Arc::clone(&recorder) as _;
    let bytes = (2 << 30) + PAGE;
    let arena = shimmer_kernels::Arena::new(bytes).unwrap();
    drop(Registered::new(&device, &Arc::default(), arena.start(), bytes).unwrap());
    assert_eq!(recorder.calls(), [1 << 30, 1 << 30, PAGE]);
}

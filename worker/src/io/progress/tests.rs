use proptest::prelude::*;

use super::*;

const LENGTH: usize = 3 * 4096;

fn candidate(copy: usize) -> Candidate {
    Candidate { copy, direct: Some(4096), checked: true }
}

fn piece(progress: &Progress) -> Piece {
    match progress.step() {
        Step::Read(piece) => piece,
        step => panic!("{step:?} instead of a read"),
    }
}

/// Answers each read in turn and returns what the machine had to say, and its last step.
fn check(copies: usize, answers: &[Result<usize, i32>]) -> (Vec<Notice>, Progress) {
    let mut progress = Progress::new(LENGTH, (0..copies).map(candidate).collect());
    let mut notices = Vec::new();
    for answer in answers {
        let piece = piece(&progress);
        notices.extend(progress.answered(&piece, *answer));
    }
    (notices, progress)
}

#[test]
fn a_short_read_is_continued_where_it_ended() {
    let (notices, progress) = check(1, &[Ok(4096)]);
    assert_eq!(piece(&progress), Piece { copy: 0, direct: true, range: 4096..LENGTH });
    assert!(notices.is_empty());
    let (_, progress) = check(1, &[Ok(4096), Ok(100)]);
    assert_eq!(piece(&progress), Piece { copy: 0, direct: false, range: 4196..LENGTH });
    let (_, progress) = check(1, &[Ok(4096), Ok(100), Ok(LENGTH - 4196)]);
    assert_eq!(progress.step(), Step::Done { copy: 0, direct: false });
    let (_, progress) = check(1, &[Ok(4096), Ok(8192)]);
    assert_eq!(progress.step(), Step::Done { copy: 0, direct: true });
    assert_eq!(progress.bytes(), LENGTH as u64);
}

#[test]
fn interrupted_and_busy_reads_are_repeated_with_a_limit() {
    for number in [libc::EINTR, libc::EAGAIN, libc::EBUSY] {
        let allowed = vec![Err(number); AGAIN_MAX as usize];
        let (notices, progress) = check(1, &allowed);
        assert!(notices.is_empty());
        assert_eq!(piece(&progress).range, 0..LENGTH);
        // Progress in between forgives.
        let (notices, _) = check(1, &[allowed.clone(), vec![Ok(1)], allowed.clone()].concat());
        assert!(notices.is_empty());
        let (notices, progress) = check(1, &[allowed, vec![Err(number)]].concat());
        assert_eq!(notices, [Notice::CopyFailed { copy: 0 }]);
        assert_eq!(progress.step(), Step::Failed);
        assert_eq!(progress.failures()[0].cause, Cause::Busy(number));
    }
}

#[test]
fn a_refused_direct_read_goes_through_the_page_cache_once_and_for_all() {
    let (notices, progress) = check(1, &[Ok(4096), Err(libc::EINVAL)]);
    assert_eq!(notices, [Notice::DirectRefused { copy: 0 }]);
    assert_eq!(piece(&progress), Piece { copy: 0, direct: false, range: 4096..LENGTH });
    // There is nothing left to fall back to.
    let (notices, progress) = check(1, &[Err(libc::EINVAL), Err(libc::EINVAL)]);
    assert_eq!(notices, [Notice::DirectRefused { copy: 0 }, Notice::CopyFailed { copy: 0 }]);
    assert_eq!(progress.step(), Step::Failed);
}

#[test]
fn another_copy_begins_at_the_beginning() {
    let (notices, progress) = check(2, &[Ok(8192), Err(libc::EIO)]);
    assert_eq!(notices, [Notice::CopyFailed { copy: 0 }]);
    assert_eq!(piece(&progress), Piece { copy: 1, direct: true, range: 0..LENGTH });
    let failure = Failure { copy: 0, got: 8192, cause: Cause::System(libc::EIO) };
    assert_eq!(progress.failures(), std::slice::from_ref(&failure));
    let (_, progress) = check(2, &[Ok(8192), Err(libc::EIO), Ok(100), Ok(0)]);
    assert_eq!(progress.step(), Step::Failed);
    assert_eq!(
        progress.failures(),
        [failure, Failure { copy: 1, got: 100, cause: Cause::Truncated }]
    );
    assert_eq!(progress.bytes(), 8292);
}

#[test]
fn a_slab_is_checked_once_and_a_damaged_one_comes_from_another_copy() {
    let unchecked = |copy| Candidate { checked: false, ..candidate(copy) };
    let mut progress = Progress::new(LENGTH, vec![unchecked(0), unchecked(1)]);
    let read_all = |progress: &mut Progress| {
        let piece = piece(progress);
        assert_eq!(progress.answered(&piece, Ok(LENGTH)), None);
    };
    read_all(&mut progress);
    assert_eq!(progress.step(), Step::Check { copy: 0 });
    let cause = Cause::Digest { expected: "a".to_owned(), found: "b".to_owned() };
    assert_eq!(progress.checked(Err(cause)), Some(Notice::CopyFailed { copy: 0 }));
    read_all(&mut progress);
    assert_eq!(progress.checked(Ok(())), None);
    assert_eq!(progress.step(), Step::Done { copy: 1, direct: true });
}

#[test]
fn large_slabs_are_read_in_pieces() {
    let length = PIECE_BYTES * 2 + 4096;
    let mut progress = Progress::new(length, vec![candidate(0)]);
    let mut ranges = Vec::new();
    while let Step::Read(piece) = progress.step() {
        ranges.push(piece.range.clone());
        progress.answered(&piece, Ok(piece.range.len()));
    }
    let (one, two) = (PIECE_BYTES, PIECE_BYTES * 2);
    assert_eq!(ranges, [0..one, one..two, two..length]);
}

fn answer() -> impl Strategy<Value = Result<usize, i32>> {
    let numbers = [libc::EINTR, libc::EAGAIN, libc::EINVAL, libc::EIO, libc::ENOMEM];
    prop_oneof![8 => (0..=LENGTH).prop_map(Ok), 1 => prop::sample::select(numbers.to_vec()).prop_map(Err)]
}

proptest! {
    /// Whatever is answered: reads continue without a hole, direct ones keep the alignment, and the read ends.
    #[test]
    fn every_read_ends_and_leaves_no_hole(copies in 1usize..4, answers in prop::collection::vec(answer(), 1..200)) {
        let mut progress = Progress::new(LENGTH, (0..copies).map(candidate).collect());
        let (mut filled, mut copy) = (0, 0);
        for answer in answers.into_iter().chain(std::iter::repeat(Err(libc::EIO))) {
            let Step::Read(piece) = progress.step() else { break };
            if piece.copy != copy {
                (copy, filled) = (piece.copy, 0);
            }
            prop_assert_eq!(piece.range.start, filled);
            prop_assert!(!piece.direct || piece.range.start.is_multiple_of(4096));
            let answer = answer.map(|count| count.min(piece.range.len()));
            filled += answer.unwrap_or(0);
            progress.answered(&piece, answer);
        }
        match progress.step() {
            Step::Done { copy: last, .. } => prop_assert_eq!((last, filled), (copy, LENGTH)),
            Step::Failed => prop_assert_eq!(progress.failures().len(), copies),
            step => prop_assert!(false, "{:?}", step),
        }
    }
}

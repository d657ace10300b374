use std::path::Path;
use std::time::Instant;

use super::*;
use crate::engine::FinishReason;
use crate::sequence::{Generation, StopRules};

const DEADLINE: Duration = Duration::from_secs(20);

fn options(directory: &Path) -> JournalOptions {
    JournalOptions {
        directory: directory.to_owned(),
        keep: Duration::from_secs(3600),
        limit_bytes: 1 << 20,
        timeout: Duration::from_secs(10),
    }
}

fn accepted(id: &str) -> Accepted {
    let generation = Generation {
        id: id.to_owned(),
        prompt: vec![1; 100],
        stop: StopRules { max_tokens: Some(50), ..StopRules::default() },
        ..Generation::default()
    };
    Accepted { container_digest: "c".to_owned(), math_id: "m".to_owned(), generation }
}

fn ending(completion_tokens: u32) -> Ending {
    Ending {
        reason: FinishReason::Length,
        matched_stop: None,
        completion_tokens,
        logits_sha256: None,
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn kept(acceptance: Acceptance) -> Entry {
    match acceptance {
        Acceptance::Kept(entry) => entry,
        other => panic!("{other:?}"),
    }
}

/// Reads a request until what is written satisfies a condition.
async fn wait(journal: &Journal, id: &str, condition: impl Fn(&Recovered) -> bool) -> Recovered {
    let start = Instant::now();
    loop {
        let found = journal.recover(id).await.unwrap().unwrap();
        if condition(&found) {
            return found;
        }
        assert!(start.elapsed() < DEADLINE, "waited in vain: {found:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn what_is_accepted_is_there_at_once_and_tokens_follow() {
    let temp = tempfile::tempdir().unwrap();
    block_on(async {
        let journal = Journal::open(options(temp.path())).unwrap();
        assert_eq!(journal.recover("a").await.unwrap(), None);
        let mut entry = kept(journal.accept(accepted("a")).await);
        // As another coordinator sees it.
        let other = Journal::open(options(temp.path())).unwrap();
        let found = other.recover("a").await.unwrap().unwrap();
        assert_eq!((&found.accepted, found.tokens.len()), (&accepted("a"), 0));
        assert!(matches!(other.accept(accepted("a")).await, Acceptance::Exists));
        entry.tokens(&[7, 8]);
        entry.tokens(&[9]);
        wait(&other, "a", |found| found.tokens == [7, 8, 9]).await;
        entry.tokens(&[10]);
        entry.finish(ending(4));
        drop(entry);
        let found = wait(&other, "a", |found| found.ending.is_some()).await;
        assert_eq!((found.tokens, found.ending), (vec![7, 8, 9, 10], Some(ending(4))));
        assert_eq!((journal.stats().accepted, journal.stats().pending_tokens), (1, 0));
    });
}

#[test]
fn closing_writes_what_was_said() {
    let temp = tempfile::tempdir().unwrap();
    block_on(async {
        let journal = Journal::open(options(temp.path())).unwrap();
        let mut entry = kept(journal.accept(accepted("a")).await);
        entry.tokens(&[1, 2, 3]);
        drop(entry);
        drop(journal);
        let journal = Journal::open(options(temp.path())).unwrap();
        let found = journal.recover("a").await.unwrap().unwrap();
        assert_eq!((found.tokens, found.ending), (vec![1, 2, 3], None));
    });
}

#[test]
fn whoever_takes_over_writes_alone() {
    let temp = tempfile::tempdir().unwrap();
    block_on(async {
        let (here, there) = (
            Journal::open(options(temp.path())).unwrap(),
            Journal::open(options(temp.path())).unwrap(),
        );
        let mut first = kept(here.accept(accepted("a")).await);
        first.tokens(&[1, 2, 3]);
        let found = wait(&there, "a", |found| found.tokens.len() == 3).await;
        // The first two come again.
        let mut second = there.take_over(found, 2).await.unwrap();
        first.tokens(&[4, 5]);
        drop(first);
        drop(here);
        second.tokens(&[1]);
        second.tokens(&[2, 4]);
        second.tokens(&[5, 6]);
        let found = wait(&there, "a", |found| found.tokens.len() > 5).await;
        assert_eq!(found.tokens, [1, 2, 3, 4, 5, 6]);
    });
}

#[test]
fn a_damaged_file_is_refused_by_its_name() {
    let temp = tempfile::tempdir().unwrap();
    block_on(async {
        let journal = Journal::open(options(temp.path())).unwrap();
        drop(kept(journal.accept(accepted("a")).await));
        let path = temp.path().join(Directory::name("a"));
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[40] ^= 4;
        bytes.push(0);
        std::fs::write(&path, &bytes).unwrap();
        let error = journal.recover("a").await.unwrap_err().to_string();
        assert!(error.contains(&Directory::name("a")) && error.contains("at byte 0"), "{error}");
        // A file under the name of another request.
        drop(kept(journal.accept(accepted("b")).await));
        std::fs::copy(temp.path().join(Directory::name("b")), &path).unwrap();
        let error = journal.recover("a").await.unwrap_err().to_string();
        assert!(error.contains("it holds request \"b\""), "{error}");
        assert_eq!(journal.stats().read_failures, 2);
    });
}

#[test]
fn old_files_go_and_room_is_made() {
    let temp = tempfile::tempdir().unwrap();
    block_on(async {
        let journal =
            Journal::open(JournalOptions { limit_bytes: 1800, ..options(temp.path()) }).unwrap();
        let age = |id: &str, seconds| {
            let path = temp.path().join(Directory::name(id));
            let file = std::fs::File::options().append(true).open(path).unwrap();
            file.set_modified(std::time::SystemTime::now() - Duration::from_secs(seconds)).unwrap();
        };
        let open = kept(journal.accept(accepted("open")).await);
        let length = journal.stats().bytes;
        assert!((451..600).contains(&length), "three files fit, four do not: {length}");
        drop(kept(journal.accept(accepted("idle")).await));
        let start = Instant::now();
        while journal.stats().open > 1 {
            assert!(start.elapsed() < DEADLINE);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(kept(journal.accept(accepted("young")).await));
        // Nothing may go: one is written, the others may be written by somebody else.
        assert!(matches!(journal.accept(accepted("fourth")).await, Acceptance::Without));
        assert_eq!(journal.stats().accept_failures, 1);
        age("idle", 100);
        age("open", 9999);
        drop(kept(journal.accept(accepted("fourth")).await));
        assert_eq!(journal.recover("idle").await.unwrap(), None);
        assert!(journal.recover("open").await.unwrap().is_some());
        assert_eq!(journal.stats().removed, 1);
        drop(open);
    });
}

#[test]
fn the_thread_cleans_up_by_itself() {
    let temp = tempfile::tempdir().unwrap();
    block_on(async {
        let keep = Duration::from_millis(200);
        let journal = Journal::open(JournalOptions { keep, ..options(temp.path()) }).unwrap();
        let open = kept(journal.accept(accepted("open")).await);
        drop(kept(journal.accept(accepted("gone")).await));
        let start = Instant::now();
        while journal.recover("gone").await.unwrap().is_some() {
            assert!(start.elapsed() < DEADLINE);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(journal.recover("open").await.unwrap().is_some(), "it is open");
        drop(open);
    });
}

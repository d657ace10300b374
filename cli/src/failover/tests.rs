use super::*;

fn ask(endpoint: usize, ask: Ask, wait: bool) -> Next {
    Next::Ask { endpoint, ask, wait }
}

/// A search over three coordinators that got its first events from number 0.
fn begun(resumable: bool) -> Search {
    let mut search = Search::new(3, 0);
    search.progress(Some(resumable));
    search.progress(None);
    search
}

#[test]
fn a_refusal_asks_each_other_once() {
    let mut search = Search::new(3, 0);
    assert_eq!(search.after(Outcome::Busy), ask(1, Ask::Anew, false));
    assert_eq!(search.after(Outcome::Busy), ask(2, Ask::Anew, false));
    assert_eq!(search.after(Outcome::Busy), Next::GiveUp);
    assert_eq!(Search::new(1, 0).after(Outcome::Busy), Next::GiveUp);
    assert_eq!(Search::new(3, 1).after(Outcome::Final), Next::GiveUp);
}

#[test]
fn a_break_before_the_first_event_may_have_been_heard() {
    let mut search = Search::new(2, 0);
    assert_eq!(search.after(Outcome::Broken), ask(1, Ask::Anew, false));
    // The name is there already: it is our own attempt.
    assert_eq!(search.after(Outcome::Known), ask(1, Ask::Rest, false));
    assert_eq!(search.after(Outcome::Unknown), ask(0, Ask::Anew, true));
    // Without an attempt of ours the name is somebody else's.
    assert_eq!(Search::new(2, 0).after(Outcome::Known), Next::GiveUp);
}

#[test]
fn the_rest_is_looked_for_where_the_stream_was_and_then_elsewhere() {
    let mut search = begun(true);
    assert_eq!(search.after(Outcome::Broken), ask(0, Ask::Rest, false));
    assert_eq!(search.after(Outcome::Broken), ask(1, Ask::Rest, false));
    assert_eq!(search.after(Outcome::Unknown), ask(2, Ask::Rest, true));
    // Number 1 is not asked again.
    assert_eq!(search.after(Outcome::Broken), ask(0, Ask::Rest, true));
    assert_eq!(search.after(Outcome::Broken), ask(2, Ask::Rest, true));
    assert_eq!(search.after(Outcome::Unknown), ask(0, Ask::Rest, true));
    assert_eq!(search.after(Outcome::Unknown), Next::Lost);
    // Events come again: everything begins anew.
    search.progress(None);
    assert_eq!(search.after(Outcome::Broken), ask(0, Ask::Rest, false));
}

#[test]
fn a_coordinator_that_stops_is_not_asked_first() {
    let mut search = begun(true);
    assert_eq!(search.after(Outcome::Resumable), ask(1, Ask::Rest, false));
    let mut before_the_first_event = Search::new(2, 0);
    assert_eq!(before_the_first_event.after(Outcome::Resumable), ask(1, Ask::Rest, false));
}

#[test]
fn an_answer_without_a_journal_ends_where_it_breaks() {
    assert_eq!(begun(false).after(Outcome::Broken), Next::GiveUp);
    assert_eq!(begun(true).after(Outcome::Final), Next::GiveUp);
}

fn check(status: &Status, anew: Outcome, rest: Outcome) {
    assert_eq!(Outcome::of(status, Ask::Anew), anew, "{status:?}");
    assert_eq!(Outcome::of(status, Ask::Rest), rest, "{status:?}");
}

#[test]
fn statuses_say_what_can_help() {
    use Outcome::{Broken, Busy, Final, Known, Resumable, Unknown};
    let second = Duration::from_secs(1);
    check(&status::resumable("a", "X", "x", second), Resumable, Resumable);
    check(&status::unavailable("DRAINING", "x", Some(second)), Busy, Busy);
    check(&status::resource_exhausted("QUEUE_FULL", "x", None), Busy, Busy);
    check(&Status::unavailable("connection reset"), Broken, Broken);
    check(&Status::unknown("h2 protocol error"), Broken, Broken);
    check(&Status::internal("stream closed"), Broken, Broken);
    check(&status::internal("ARITHMETIC", "x"), Final, Final);
    check(&status::aborted("RESUMED_ELSEWHERE", "x"), Final, Final);
    check(&status::invalid_argument("input", "x"), Final, Final);
    check(&status::already_exists("request", "a", "x"), Known, Final);
    check(&status::not_found("request", "a", "x"), Final, Unknown);
    check(&status::failed_precondition("OTHER_MODEL", "x"), Final, Unknown);
    check(&status::data_loss("JOURNAL_DAMAGED", "x"), Final, Unknown);
}

#[test]
fn a_stream_that_ends_without_an_event_costs_patience() {
    let ms = Duration::from_millis;
    let mut search = Search::new(1, 0);
    let mut patience = Patience::new(ms(5000), 1);
    let begin = Instant::now();
    let mut now = begin;
    let mut rounds = 0;
    // A coordinator that opens the stream each time, cannot compute, and asks for two seconds.
    loop {
        patience.tried(now);
        assert_eq!(search.after(Outcome::Resumable), ask(0, Ask::Rest, true), "round {rounds}");
        let Some(wait) = patience.pause(Some(ms(2000)), now) else { break };
        (now, rounds) = (now + wait, rounds + 1);
    }
    assert_eq!((now - begin, rounds), (ms(5000), 3));
}

#[test]
fn pauses_grow_until_an_event_comes() {
    let ms = Duration::from_millis;
    let mut patience = Patience::new(Duration::from_secs(60), 1);
    let now = Instant::now();
    let waits: Vec<Duration> = (0..9).map(|_| patience.pause(None, now).unwrap()).collect();
    assert!(waits[0] <= MIN_WAIT && waits[8] >= MAX_WAIT / 2, "{waits:?}");
    assert!(patience.rewarded() && !patience.rewarded());
    assert!(patience.pause(None, now + Duration::from_secs(100)).unwrap() <= MIN_WAIT);
    assert_eq!(
        patience.pause(None, now + Duration::from_secs(159)).map(|w| w <= ms(1000)),
        Some(true)
    );
    assert_eq!(patience.pause(None, now + Duration::from_secs(160)), None);
}

//! Coordinators that die, and what others know of their requests.

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::{
    status,
    v1::{CancelRequest, FinishReason, generate_response::Event},
};
use shimmer_tests::{models::TinyModel, wait::wait_until};
use tonic::Code;

use super::bench::{Bench, DEADLINE, plain, request, with_logits};

#[test]
fn a_killed_coordinator_loses_no_accepted_request() {
    let mut bench = Bench::new();
    let survivor = bench.cluster.port;
    let expected = bench.whole(survivor, request("undisturbed", 300));
    assert_eq!(expected.len(), 302);
    for known in [1, 2, 30, 120] {
        let mut dying = bench.another(&[]);
        let id = format!("killed-at-{known}");
        let (stream, events) = bench.begin(dying.port, request(&id, 300), known);
        dying.process.kill();
        drop(stream);
        assert_eq!(bench.resumed(survivor, &id, &events), expected, "killed at {known}");
    }
}

#[test]
fn what_needs_logits_is_generated_again() {
    let mut bench = Bench::new();
    let survivor = bench.cluster.port;
    let expected = bench.whole(survivor, with_logits("undisturbed", 120));
    let mut dying = bench.another(&[]);
    let (stream, events) = bench.begin(dying.port, with_logits("killed", 120), 50);
    dying.process.kill();
    drop(stream);
    assert_eq!(bench.resumed(survivor, "killed", &events), expected);
    // After its end as well, from the first event on.
    assert_eq!(bench.resumed(survivor, "killed", &[]), expected);
}

#[test]
fn a_client_that_comes_back_gets_the_rest_at_the_same_coordinator() {
    let bench = Bench::new();
    let port = bench.cluster.port;
    let expected = bench.whole(port, request("undisturbed", 400));
    let (stream, events) = bench.begin(port, request("gone", 400), 20);
    drop(stream);
    assert_eq!(bench.resumed(port, "gone", &events), expected);
    // The first stream is still there: it hears who has taken its place.
    let (mut first, events) = bench.begin(port, request("taken", 400), 20);
    assert_eq!(bench.resumed(port, "taken", &events), expected);
    let (more, status) = bench.rest(&mut first);
    if more.last().is_none_or(|event| !matches!(event.event, Some(Event::Finished(_)))) {
        let status = status.unwrap();
        assert_eq!(status.code(), Code::Aborted, "{status:?}");
        assert_eq!(status::reason(&status).as_deref(), Some("RESUMED_ELSEWHERE"));
    }
}

#[test]
fn a_finished_request_is_kept_with_its_name() {
    let mut bench = Bench::new();
    let other = bench.another(&[]);
    let port = bench.cluster.port;
    let expected = bench.whole(port, request("done", 20));
    for port in [port, other.port] {
        wait_until("the end to be written", DEADLINE, || {
            bench.resumed(port, "done", &[]).len() == expected.len()
        });
        assert_eq!(bench.resumed(port, "done", &[]), expected);
        assert_eq!(bench.resumed(port, "done", &expected[..7]), expected);
        assert_eq!(bench.resumed(port, "done", &expected).len(), expected.len(), "nothing is left");
        let mut client = bench.connect(port);
        let again = bench.cluster.block_on(client.generate(request("done", 20))).unwrap_err();
        assert_eq!(again.code(), Code::AlreadyExists, "{again:?}");
        assert!(again.message().contains("\"done\""), "{again:?}");
        let refused = bench.resume(port, "done", Some(22)).unwrap();
        let (_, status) = bench.rest(&mut { refused });
        let status = status.unwrap();
        assert_eq!(status::violations(&status)[0].0, "after_sequence", "{status:?}");
        let unknown = bench.resume(port, "never", None).unwrap_err();
        assert_eq!(unknown.code(), Code::NotFound, "{unknown:?}");
    }
}

#[test]
fn a_cancelled_request_stays_cancelled() {
    let bench = Bench::new();
    let port = bench.cluster.port;
    let (mut stream, mut events) = bench.begin(port, request("cancelled", 900), 10);
    let mut client = bench.connect(port);
    let cancel = CancelRequest { request_id: "cancelled".to_owned() };
    assert!(bench.cluster.block_on(client.cancel(cancel)).unwrap().into_inner().cancelled);
    let (rest, status) = bench.rest(&mut stream);
    assert!(status.is_none(), "{status:?}");
    events.extend(rest);
    let Some(Event::Finished(finished)) = events.last().unwrap().event.clone() else {
        panic!("{events:?}")
    };
    assert_eq!(finished.reason(), FinishReason::Cancelled);
    let expected = plain(events.clone());
    wait_until("the end to be written", DEADLINE, || {
        bench
            .resume(port, "cancelled", None)
            .is_ok_and(|mut stream| plain(bench.rest(&mut stream).0) == expected)
    });
    assert_eq!(bench.resumed(port, "cancelled", &events[..3]), expected);
}

#[test]
fn another_model_and_no_journal_are_refused_by_name() {
    let mut bench = Bench::new();
    bench.whole(bench.cluster.port, request("done", 5));
    let plain = bench.with_args(&[]);
    let refused = bench.resume(plain.port, "done", None).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(status::reason(&refused).as_deref(), Some("NO_JOURNAL"));

    // Its workers refuse it, but it has the journal.
    let model = TinyModel::new(Preset::Mixtral);
    let journal = bench.journal.display().to_string();
    let container = model.container(NumericClass::default());
    let args = bench.cluster.coordinator_args(&container, &["--journal", &journal]);
    let logs = bench.cluster.directory().to_owned();
    let mut other =
        shimmer_tests::process::Process::shimmer("other", &args, [("RUST_BACKTRACE", "1")], &logs);
    let port = other.listening_port(DEADLINE);
    let refused = bench.resume(port, "done", None).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert_eq!(status::reason(&refused).as_deref(), Some("OTHER_MODEL"));
    assert!(refused.message().contains("container"), "{refused:?}");
}

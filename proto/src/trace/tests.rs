use std::{collections::BTreeSet, time::SystemTime};

use super::*;

#[test]
fn traceparents_are_read_as_recommended() {
    let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let context = TraceContext::parse(text).unwrap();
    assert!(context.sampled);
    assert_eq!(context.to_string(), text);
    assert_eq!(TraceContext::from_wire(context.on_wire()), Some(context));
    let unsampled = TraceContext::parse(&text.replace("-01", "-00")).unwrap();
    assert!(!unsampled.sampled);
    let later = format!("cc-{}-more", &text[3..]);
    assert_eq!(TraceContext::parse(&later), Some(context));
    for bad in [
        "",
        "00",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01more",
        "00_0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319é-b7ad6b7169203331-01",
    ] {
        assert_eq!(TraceContext::parse(bad), None, "{bad}");
    }
}

#[test]
fn the_share_of_sampled_requests_is_the_one_asked_for() {
    let sampled = |percent| {
        let (tracer, _queue, _) = Tracer::new(percent);
        (0..100_000).filter(|_| tracer.begin(None).is_some()).count()
    };
    assert_eq!(sampled(0.0), 0);
    assert_eq!(sampled(100.0), 100_000);
    // Six standard deviations of a binomial distribution.
    assert!((810..=1190).contains(&sampled(1.0)), "{}", sampled(1.0));
}

#[test]
fn a_parents_decision_is_followed_both_ways() {
    let parent = |sampled| Some(TraceContext { trace: 7, span: 8, sampled });
    let (never, _queue, _) = Tracer::new(0.0);
    assert_eq!(never.begin(parent(true)).unwrap().trace, 7);
    let (always, _queue, _) = Tracer::new(100.0);
    assert_eq!(always.begin(parent(false)), None);
    assert_eq!(Tracer::default().begin(parent(true)), None);
}

#[test]
fn a_full_queue_loses_spans_and_counts_them() {
    let (tracer, queue, counts) = Tracer::with_queue(100.0, 3);
    let above = tracer.begin(None).unwrap();
    let now = [SystemTime::UNIX_EPOCH; 2];
    let ids: BTreeSet<u64> = (0..10).map(|_| tracer.span_id()).collect();
    assert_eq!(ids.len(), 10, "ids are unique");
    for span in ids {
        tracer.finish(SpanRecord::below(above, span, names::LAYER, now, Vec::new()));
    }
    assert_eq!((counts.dropped(), queue.try_iter().count()), (7, 3));
}

//! Two assignments beside each other, stand-ins, and giving back: on one stream, by hand.

use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
};

use shimmer_proto::expert::v1::{
    Adopt, Assign, ErrorCode, ExpertWork, Fence, LayerExperts, Release, expert_result::Payload,
    session_request::Body as Ask, session_response::Body as Said,
};
use shimmer_tests::wait::wait_until;
use shimmer_worker::{
    ExpertCore, ServeConfig, TierOptions, store::LoadProgress, tier_options::RamSetting,
};

use super::{
    bench::{self, SOON, WorkerServer, moe_layers},
    raw::{EPOCH, GENERATION, RawClient},
};

const NEXT: u64 = GENERATION + 1;

fn of(layer: u32, experts: &[u32]) -> LayerExperts {
    LayerExperts { layer, experts: experts.to_vec() }
}

/// An assignment of these experts of every layer.
fn assign(generation: u64, experts: &[u32]) -> Assign {
    let layers = moe_layers().into_iter().map(|(layer, _)| of(layer, experts));
    Assign { epoch: EPOCH, generation, layers: layers.collect() }
}

fn work(generation: u64, layer: u32, experts: &[u32]) -> ExpertWork {
    let fence = Fence { epoch: EPOCH, generation, step: 1, layer, ..Fence::default() };
    bench::work(fence, experts, 4, 11)
}

/// What a worker answers that owns everything.
fn answer(layer: u32, experts: &[u32]) -> Payload {
    let mut session = bench::local_session();
    let fence = Fence { epoch: 1, generation: 1, step: 1, layer, ..Fence::default() };
    session.work(&bench::work(fence, experts, 4, 11)).unwrap().payload.unwrap()
}

fn result(client: &mut RawClient, work: ExpertWork) -> Payload {
    client.ask(Ask::Work(work));
    match client.hear() {
        Ok(Some(Said::Result(result))) => result.payload.unwrap(),
        other => panic!("expected a result, heard {other:?}"),
    }
}

fn refused(client: &mut RawClient, work: ExpertWork) -> (ErrorCode, String) {
    client.ask(Ask::Work(work));
    let error = client.refused();
    assert!(!error.fatal, "{error:?}");
    (error.code(), error.detail)
}

/// Hears everything up to the end of a load, which is that of this generation.
fn ready(client: &mut RawClient, generation: u64) {
    loop {
        match client.hear() {
            Ok(Some(Said::Progress(_))) => {}
            Ok(Some(Said::Ready(ready))) => return assert_eq!(ready.generation, generation),
            other => panic!("expected the end of a load, heard {other:?}"),
        }
    }
}

/// Another coordinator of the worker, whose load gets no further than its first expert until it is let go. Nobody else can
/// load meanwhile.
struct Slow {
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
    loaded: AtomicU64,
}

impl LoadProgress for Gate {
    fn loaded(&self, _bytes: u64) {
        self.loaded.fetch_add(1, Relaxed);
        let open = self.open.lock().unwrap();
        drop(self.opened.wait_while(open, |open| !*open).unwrap());
    }
}

impl Slow {
    fn start(core: &Arc<ExpertCore>, assign: Assign) -> Self {
        let gate = Arc::<Gate>::default();
        let (mut session, seen) = (core.session(), Arc::clone(&gate));
        let thread = std::thread::spawn(move || {
            let _ready = session.assign(&assign, &*seen).unwrap();
        });
        wait_until("the load to be under way", SOON, || gate.loaded.load(Relaxed) > 0);
        Self { gate, thread: Some(thread) }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        *self.gate.open.lock().unwrap() = true;
        self.gate.opened.notify_all();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

#[test]
fn work_goes_on_while_the_next_generation_is_loaded() {
    let server = WorkerServer::start("w");
    let client = &mut RawClient::greeted(&server);
    client.assign(assign(GENERATION, &[0, 1])).unwrap();
    let layer = moe_layers()[0].0;
    let slow = Slow::start(&server.core, assign(1, &[8, 9]));
    client.ask(Ask::Assign(assign(NEXT, &[1, 2, 3])));
    assert!(matches!(client.hear(), Ok(Some(Said::Progress(_)))), "the load has begun");
    for (layer, _) in moe_layers() {
        let found = result(client, work(GENERATION, layer, &[0, 1]));
        assert_eq!(found, answer(layer, &[0, 1]));
    }
    client.ask(Ask::SelfTest(shimmer_proto::expert::v1::SelfTest { layer, expert: 0 }));
    assert!(matches!(client.hear(), Ok(Some(Said::SelfTest(_)))));
    let (code, detail) = refused(client, work(NEXT, layer, &[1, 2]));
    assert_eq!(code, ErrorCode::StaleFence, "{detail}");
    assert!(detail.ends_with("this session is at epoch 77, generation 3"), "{detail}");
    drop(slow);
    ready(client, NEXT);
    // Each by its own.
    assert_eq!(result(client, work(GENERATION, layer, &[0, 1])), answer(layer, &[0, 1]));
    assert_eq!(result(client, work(NEXT, layer, &[1, 2, 3])), answer(layer, &[1, 2, 3]));
    assert_eq!(refused(client, work(NEXT, layer, &[0])).0, ErrorCode::NotOwned);
    assert_eq!(refused(client, work(GENERATION, layer, &[2])).0, ErrorCode::NotOwned);
    let (code, detail) = refused(client, work(NEXT + 1, layer, &[1]));
    assert_eq!(code, ErrorCode::StaleFence);
    let both = "this session is at epoch 77, generation 3 and epoch 77, generation 4";
    assert!(detail.ends_with(both), "{detail}");
}

#[test]
fn what_is_released_is_refused_and_gives_its_memory_back() {
    let server = WorkerServer::start("w");
    let client = &mut RawClient::greeted(&server);
    client.assign(assign(GENERATION, &[0, 1])).unwrap();
    client.assign(assign(NEXT, &[1, 2])).unwrap();
    let layer = moe_layers()[0].0;
    let pinned = || server.core.tier_snapshot().experts_pinned;
    let layers = moe_layers().len() as u64;
    assert_eq!(pinned(), 3 * layers);
    client.ask(Ask::Release(Release { epoch: EPOCH, generation: NEXT }));
    let (code, detail) = refused(client, work(GENERATION, layer, &[1]));
    assert_eq!(code, ErrorCode::StaleFence);
    assert!(detail.ends_with("this session is at epoch 77, generation 4"), "{detail}");
    assert_eq!(pinned(), 2 * layers);
    assert_eq!(result(client, work(NEXT, layer, &[1, 2])), answer(layer, &[1, 2]));
    assert_eq!(server.counters().snapshot().assignments_released, 1);
    // A load that nobody waits for any more ends without a word.
    let slow = Slow::start(&server.core, assign(1, &[8, 9]));
    client.ask(Ask::Assign(assign(NEXT + 1, &[5])));
    assert!(matches!(client.hear(), Ok(Some(Said::Progress(_)))));
    client.ask(Ask::Release(Release { epoch: EPOCH, generation: NEXT + 2 }));
    assert_eq!(refused(client, work(NEXT, layer, &[1])).0, ErrorCode::Protocol, "nothing is left");
    client.ask(Ask::Assign(assign(NEXT + 2, &[6])));
    drop(slow);
    ready(client, NEXT + 2);
    assert_eq!(result(client, work(NEXT + 2, layer, &[6])), answer(layer, &[6]));
}

#[test]
fn a_third_assignment_gives_up_the_newer_one() {
    let server = WorkerServer::start("w");
    let client = &mut RawClient::greeted(&server);
    let layer = moe_layers()[0].0;
    client.assign(assign(1, &[0])).unwrap();
    client.assign(assign(2, &[1])).unwrap();
    client.assign(assign(3, &[2])).unwrap();
    assert_eq!(
        result(client, work(1, layer, &[0])),
        answer(layer, &[0]),
        "in force until released"
    );
    assert_eq!(
        refused(client, work(2, layer, &[1])).0,
        ErrorCode::StaleFence,
        "never came into force"
    );
    assert_eq!(result(client, work(3, layer, &[2])), answer(layer, &[2]));
    client.ask(Ask::Release(Release { epoch: EPOCH, generation: 3 }));
    let slow = Slow::start(&server.core, assign(1, &[8, 9]));
    for generation in 4..100 {
        client.ask(Ask::Assign(assign(generation, &[3])));
        assert!(matches!(client.hear(), Ok(Some(Said::Progress(_)))));
        assert_eq!(result(client, work(3, layer, &[2])), answer(layer, &[2]), "still in force");
    }
    drop(slow);
    ready(client, 99);
    assert_eq!(result(client, work(99, layer, &[3])), answer(layer, &[3]));
    assert_eq!(result(client, work(3, layer, &[2])), answer(layer, &[2]));
    assert_eq!(refused(client, work(98, layer, &[3])).0, ErrorCode::StaleFence);
    assert_eq!(server.counters().snapshot().loads_failed, 0);
}

/// A server with memory for so many experts.
fn tight(experts: u64) -> WorkerServer {
    let layout = bench::container().expert_layout(moe_layers()[0].0).unwrap();
    let ram = RamSetting::Bytes(experts * layout.slab_bytes() as u64);
    let tiers = TierOptions { ram, pilot_workers: 0, ..TierOptions::default() };
    WorkerServer::with(bench::tiered_core("w", tiers), 0, ServeConfig::default())
}

#[test]
fn a_stand_in_with_full_memory_answers_as_the_owner_does() {
    let layers = moe_layers();
    let count = layers.len() as u64;
    // Two experts of each layer are pinned and nothing is left, or as much as four more take.
    for (memory, slots) in [(2 * count, 2 * count), (2 * count + 4, 2 * count + 4)] {
        let server = tight(memory);
        let client = &mut RawClient::greeted(&server);
        client.assign(assign(GENERATION, &[0, 1])).unwrap();
        let seen = || {
            let now = server.core.tier_snapshot();
            (now.slots, now.experts_pinned)
        };
        assert_eq!(seen(), (2 * count, 2 * count));
        for &(layer, _) in &layers {
            let (code, detail) = refused(client, work(GENERATION, layer, &[5]));
            assert_eq!(code, ErrorCode::NotOwned, "{detail}");
            let adopt =
                Adopt { epoch: EPOCH, generation: GENERATION, layers: vec![of(layer, &[1, 5, 6])] };
            client.ask(Ask::Adopt(adopt.clone()));
            // The work is right behind it; asking twice changes nothing.
            assert_eq!(result(client, work(GENERATION, layer, &[5, 6])), answer(layer, &[5, 6]));
            client.ask(Ask::Adopt(adopt));
            let found = result(client, work(GENERATION, layer, &[0, 1, 5, 6]));
            assert_eq!(found, answer(layer, &[0, 1, 5, 6]));
        }
        assert_eq!(seen().0, slots, "no more than the budget, and all of it");
        assert_eq!(server.counters().snapshot().experts_adopted, 2 * count);
        client.assign(assign(NEXT, &[0, 1])).unwrap();
        client.ask(Ask::Release(Release { epoch: EPOCH, generation: NEXT }));
        assert_eq!(refused(client, work(NEXT, layers[0].0, &[5])).0, ErrorCode::NotOwned);
        wait_until("everything to be pinned again", SOON, || seen().1 == 2 * count);
        let found = result(client, work(NEXT, layers[0].0, &[0, 1]));
        assert_eq!(found, answer(layers[0].0, &[0, 1]));
    }
}

#[test]
fn what_cannot_be_adopted_is_not_owned() {
    let server = WorkerServer::start("w");
    let client = &mut RawClient::greeted(&server);
    let (layer, experts) = moe_layers()[0];
    let adopt = |generation, layers| Ask::Adopt(Adopt { epoch: EPOCH, generation, layers });
    client.ask(adopt(GENERATION, vec![of(layer, &[1])]));
    client.assign(assign(GENERATION, &[0])).unwrap();
    for (generation, layers) in [
        (NEXT, vec![of(layer, &[1])]),
        (GENERATION, vec![of(500, &[1])]),
        (GENERATION, vec![of(layer, &[2, 1])]),
        (GENERATION, vec![of(layer, &[experts])]),
    ] {
        client.ask(adopt(generation, layers));
        assert_eq!(refused(client, work(GENERATION, layer, &[1])).0, ErrorCode::NotOwned);
    }
    assert_eq!(server.counters().snapshot().adopts_refused, 5);
    assert_eq!(result(client, work(GENERATION, layer, &[0])), answer(layer, &[0]));
}

/// A second coordinator that claims more than fits makes the first one's experts lie on disk, until it leaves.
#[test]
fn whether_hints_are_wanted_is_told_again() {
    let count = moe_layers().len() as u64;
    let layout = bench::container().expert_layout(moe_layers()[0].0).unwrap();
    let ram = RamSetting::Bytes(2 * count * layout.slab_bytes() as u64);
    let tiers = TierOptions { ram, pilot_workers: 1, ..TierOptions::default() };
    let server = WorkerServer::with(bench::tiered_core("w", tiers), 0, ServeConfig::default());
    let first = &mut RawClient::greeted(&server);
    first.assign(assign(GENERATION, &[0, 1])).unwrap();
    let mut second = RawClient::greeted(&server);
    second.assign(assign(1, &[2, 3])).unwrap();
    let mut told = |wanted| match first.hear() {
        Ok(Some(Said::Ready(ready))) => {
            assert_eq!((ready.generation, ready.wants_hints), (GENERATION, wanted));
            assert_eq!(ready.experts, 2 * count);
        }
        other => panic!("expected to be told, heard {other:?}"),
    };
    told(true);
    drop(second);
    told(false);
    assert_eq!(server.core.tier_snapshot().experts_pinned, 2 * count);
}

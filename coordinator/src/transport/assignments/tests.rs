//! A worker that is given generations one after the other, loads, proves, fails and restarts.

use std::sync::Arc;

use shimmer_proto::expert::v1::Identity;

use super::*;
use crate::placement::{Candidate, PlacedLayer, Placement};

const EXPERTS: u32 = 8;

fn model() -> ClusterModel {
    let digest = |expert: u32| [u8::try_from(expert).unwrap(); 16];
    ClusterModel {
        identity: Identity::default(),
        row_bytes: 68,
        hidden: 64,
        layers: (0..3)
            .map(|layer| super::super::ClusterLayer {
                layer,
                slab_bytes: 100,
                self_tests: (0..EXPERTS).map(digest).collect(),
            })
            .collect(),
    }
}

fn plan(generation: u64, workers: usize) -> Plan {
    let candidate =
        |index: usize| Candidate { id: format!("w{index}"), weight: 1.0, ..Candidate::default() };
    let candidates: Vec<Candidate> = (0..workers).map(candidate).collect();
    let layer = |layer| PlacedLayer { layer, experts: EXPERTS, slab_bytes: 100 };
    let placement = Placement::compute(&[0, 1, 2].map(layer), &candidates).unwrap();
    Plan::new(generation, Arc::new(placement))
}

/// Worker 0 with its coordinator.
struct Bench {
    held: Assignments,
    model: ClusterModel,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        Self { held: Assignments::default(), model: model(), now: Instant::now() }
    }

    fn follow(&mut self, in_force: Option<&Plan>, next: Option<&Plan>) -> Vec<String> {
        let asks = self.held.follow(in_force, next, 0, 7, &self.model, self.now);
        asks.iter().map(shown).collect()
    }

    fn load(&mut self, plan: &Plan) -> Result<(News, Vec<(u32, u32)>), String> {
        let experts = plan.share(0) as u64;
        let (epoch, generation) = (7, plan.generation);
        let ready = Ready { epoch, generation, experts, bytes: experts * 100, wants_hints: false };
        let (news, asks) = self.held.loaded(&ready, self.now)?;
        Ok((news, tests(&asks)))
    }

    fn prove(&mut self, layer: u32, expert: u32) -> Result<News, String> {
        let digest = self.model.layer(layer).unwrap().self_tests[expert as usize].to_vec().into();
        let result = SelfTestResult { layer, expert, digest };
        self.held.tested(&result, &self.model, self.now).map(|(news, _)| news)
    }

    /// Loads and proves a plan; the experts that were proved.
    fn ready(&mut self, plan: &Plan) -> Vec<(u32, u32)> {
        let (news, asked) = self.load(plan).unwrap();
        let mut news = vec![news];
        news.extend(asked.iter().map(|&(layer, expert)| self.prove(layer, expert).unwrap()));
        assert_eq!(news.last(), Some(&News::Ready(plan.generation)));
        assert_eq!(news.iter().filter(|news| matches!(news, News::Ready(_))).count(), 1);
        asked
    }
}

fn shown(ask: &Ask) -> String {
    match ask {
        Ask::Assign(assign) => {
            let experts: usize = assign.layers.iter().map(|l| l.experts.len()).sum();
            format!("assign {} {experts}", assign.generation)
        }
        Ask::Release(release) => format!("release {}", release.generation),
        other => format!("{other:?}"),
    }
}

fn tests(asks: &[Ask]) -> Vec<(u32, u32)> {
    let test = |ask: &Ask| match ask {
        Ask::SelfTest(test) => (test.layer, test.expert),
        other => panic!("{other:?} is no self-test"),
    };
    asks.iter().map(test).collect()
}

fn nothing() -> Vec<String> {
    Vec::new()
}

#[test]
fn the_next_generation_is_loaded_while_the_first_serves() {
    let (one, two) = (plan(1, 2), plan(2, 1));
    let mut bench = Bench::new();
    let share = one.share(0);
    assert_eq!(bench.follow(None, Some(&one)), [format!("assign 1 {share}")]);
    assert_eq!(bench.follow(None, Some(&one)), nothing(), "once");
    assert_eq!(bench.held.ready(), [0, 0]);
    let proved = bench.ready(&one);
    assert_eq!(proved.len(), 3, "one expert of each layer");
    assert_eq!((bench.held.ready(), bench.held.resident().0), ([1, 0], share as u64));

    assert_eq!(bench.follow(Some(&one), Some(&two)), ["assign 2 24"]);
    assert_eq!(bench.held.ready(), [1, 0], "it serves meanwhile");
    let fresh = bench.ready(&two);
    let known: Vec<(u32, u32)> = one
        .placement
        .owned_by(0)
        .into_iter()
        .flat_map(|(layer, experts)| experts.into_iter().map(move |e| (layer, e)))
        .collect();
    assert!(fresh.iter().all(|expert| !known.contains(expert)), "what is new is proved: {fresh:?}");
    assert_eq!(bench.held.ready(), [1, 2]);
    assert_eq!(bench.follow(Some(&two), None), ["release 2"]);
    assert_eq!(bench.held.ready(), [2, 0]);
}

#[test]
fn a_session_that_begins_late_is_given_one_after_the_other() {
    let (one, two) = (plan(1, 2), plan(2, 1));
    let mut bench = Bench::new();
    let asked = bench.follow(Some(&one), Some(&two));
    assert!(asked.len() == 1 && asked[0].starts_with("assign 1 "), "{asked:?}");
    assert_eq!(bench.follow(Some(&one), Some(&two)), nothing(), "not before the first is ready");
    bench.ready(&one);
    assert_eq!(bench.follow(Some(&one), Some(&two)), ["assign 2 24"]);
}

#[test]
fn a_newer_generation_takes_the_place_of_one_that_is_being_loaded() {
    let (one, two, three) = (plan(1, 2), plan(2, 3), plan(3, 1));
    let mut bench = Bench::new();
    bench.follow(None, Some(&one));
    bench.ready(&one);
    bench.follow(Some(&one), Some(&two));
    assert_eq!(bench.follow(Some(&one), Some(&three)), ["assign 3 24"]);
    assert_eq!(bench.load(&two).unwrap().0, News::Nothing, "nobody waits for it");
    bench.ready(&three);
    assert_eq!(bench.held.ready(), [1, 3]);
}

#[test]
fn a_load_that_fails_leaves_the_one_in_force() {
    let (one, two) = (plan(1, 2), plan(2, 1));
    let mut bench = Bench::new();
    bench.follow(None, Some(&one));
    assert_eq!(bench.held.failed(), None, "there is no other one");
    bench.ready(&one);
    bench.follow(Some(&one), Some(&two));
    assert_eq!(bench.held.failed(), Some(2));
    assert_eq!(bench.held.ready(), [1, 0]);
    assert_eq!(bench.follow(Some(&one), Some(&two)), nothing(), "not tried again");
    assert_eq!(bench.held.due(Duration::ZERO, Duration::ZERO), None);
}

#[test]
fn what_is_not_what_was_asked_for_is_named() {
    let one = plan(1, 1);
    let mut bench = Bench::new();
    bench.follow(None, Some(&one));
    let short = Ready { epoch: 7, generation: 1, experts: 23, bytes: 2300, wants_hints: false };
    let refusal = bench.held.loaded(&short, bench.now).unwrap_err();
    assert!(refusal.contains("23 experts in 2300 bytes, 24 in 2400 were assigned"), "{refusal}");
    let (_, asked) = bench.load(&one).unwrap();
    let (layer, expert) = asked[0];
    let wrong = SelfTestResult { layer, expert, digest: vec![99; 16].into() };
    let refusal = bench.held.tested(&wrong, &bench.model, bench.now).unwrap_err();
    assert!(refusal.contains("differently: 6363"), "{refusal}");
    let foreign = SelfTestResult { layer: 9, expert: 0, digest: vec![0; 16].into() };
    assert!(bench.held.tested(&foreign, &bench.model, bench.now).is_err());
}

#[test]
fn loads_and_tests_are_due_and_progress_puts_that_off() {
    let one = plan(1, 1);
    let (loading, proving) = (Duration::from_secs(100), Duration::from_secs(10));
    let mut bench = Bench::new();
    bench.follow(None, Some(&one));
    assert_eq!(bench.held.due(loading, proving), Some(bench.now + loading));
    bench.now += loading / 2;
    bench.held.progressed(bench.now);
    assert_eq!(bench.held.due(loading, proving), Some(bench.now + loading));
    let (_, asked) = bench.load(&one).unwrap();
    assert_eq!(bench.held.due(loading, proving), Some(bench.now + proving));
    for (layer, expert) in asked {
        bench.prove(layer, expert).unwrap();
    }
    assert_eq!(bench.held.due(loading, proving), None);
}

#[test]
fn a_worker_without_a_share_is_ready_at_once() {
    let empty = Plan::new(1, Arc::new(Placement::default()));
    let mut bench = Bench::new();
    assert_eq!(bench.follow(Some(&empty), None), ["assign 1 0"]);
    assert_eq!(bench.load(&empty).unwrap().0, News::Ready(1));
}

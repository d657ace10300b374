//! Hints of the next layer's experts: what goes out, when, and that it changes no byte.

use std::sync::Mutex;

use shimmer_kernels::{Isa, WeightFormat};
use shimmer_model::tiny::Preset;
use shimmer_proto::limits::MAX_HINT_EXPERTS;

use crate::placement::{Candidate, PlacedLayer, Placement};
use crate::sequence::{Generation, OutputRules, StopRules};
use crate::test_support::{
    Message, Sent, TestWorkers, Tiny, collect, config, kernels, start, tiny_model,
};

/// Digests of a short and a long generation that run together, and the engine's figures afterwards.
fn run(
    tiny: &Tiny,
    weights: &[f64],
    sent: Option<&Sent>,
) -> ([String; 2], crate::engine::EngineStats) {
    let mut workers = TestWorkers::new(tiny, kernels(Isa::Scalar).unwrap(), weights);
    if let Some(sent) = sent {
        workers = workers.hinted(sent);
    }
    let handle = start(tiny, workers, config(64, 48, 1));
    let generation = |id: &str, prompt: Vec<u32>| Generation {
        id: id.to_owned(),
        prompt,
        stop: StopRules { max_tokens: Some(9), ignore_eos: true, ..StopRules::default() },
        output: OutputRules { logits_digest: true, ..OutputRules::default() },
        ..Generation::default()
    };
    let streams = [
        handle.submit(generation("a", vec![1, 2, 3])).unwrap(),
        handle.submit(generation("b", (0..100).collect())).unwrap(),
    ];
    let digests = streams.map(|stream| collect(stream).sha256().to_owned());
    handle.shutdown();
    (digests, handle.stats())
}

/// The same bytes as without hints; every hint goes to the owner of its experts, ahead of the work of an earlier layer.
fn check(preset: Preset, weights: &[f64]) {
    let tiny = tiny_model(preset, WeightFormat::Q8G64, WeightFormat::Q8G64);
    let (expected, without) = run(&tiny, weights, None);
    assert_eq!((without.recall.rows.chosen, without.hints), (0, 0), "nobody asked");
    let sent = Sent::new(Mutex::default());
    let (digests, stats) = run(&tiny, weights, Some(&sent));
    assert_eq!(digests, expected, "{preset:?}");

    let moe: Vec<(u32, u32)> = tiny.container.config().moe_layers().collect();
    let placed = moe.iter().map(|&(layer, experts)| PlacedLayer { layer, experts, slab_bytes: 1 });
    let candidate = |(index, &weight): (usize, &f64)| Candidate {
        id: format!("w{index}"),
        weight,
        ..Candidate::default()
    };
    let candidates: Vec<_> = weights.iter().enumerate().map(candidate).collect();
    let placement = Placement::compute(&placed.collect::<Vec<_>>(), &candidates).unwrap();
    let sent = sent.lock().unwrap();
    let mut hints = 0;
    for (at, (worker, message)) in sent.iter().enumerate() {
        let Message::Hint(hint) = message else { continue };
        hints += 1;
        let fence = hint.fence.unwrap();
        let next = moe.iter().find(|(layer, _)| *layer > fence.layer).unwrap().0;
        assert_eq!(hint.layer, next, "the next layer with experts");
        assert!((1..=MAX_HINT_EXPERTS).contains(&hint.experts.len()));
        for (index, &expert) in hint.experts.iter().enumerate() {
            assert_eq!(placement.owner(hint.layer, expert), Some(*worker), "sent to its owner");
            assert!(!hint.experts[..index].contains(&expert), "each once");
        }
        let order = |f: &shimmer_proto::expert::v1::Fence| (f.step, f.layer);
        let late = sent[..at].iter().any(|(other, message)| match message {
            Message::Work(work) => other == worker && order(work) >= order(&fence),
            Message::Hint(_) => false,
        });
        assert!(!late, "behind the work that it should go ahead of");
    }
    assert_eq!(stats.hints, hints);
    assert!(hints >= 10, "{hints} hints");
    let crate::prediction::Recall { rows, steps, previous } = stats.recall;
    for overlap in [rows, steps, previous] {
        assert!(overlap.hits > 0 && overlap.hits <= overlap.chosen, "{overlap:?}");
        assert!(overlap.hits <= overlap.predicted);
    }
}

#[test]
fn hints_change_no_byte_and_go_ahead_of_the_work() {
    // A dense layer first, groups, several workers of which some own nothing of a layer.
    check(Preset::Glm4Moe, &[1.0]);
    check(Preset::Glm4MoeGroups, &[1.0, 2.0]);
    check(Preset::Qwen3Moe, &[1.0; 20]);
    check(Preset::Qwen3MoeTied, &[1.0]);
    check(Preset::Mixtral, &[1.0, 1.0]);
}

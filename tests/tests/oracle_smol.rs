//! The demo model (real weights, fluent text) against transformers, and what quantisation costs it.
//!
//! Needs the checkpoint that `shimmer make-demo` writes, named by SHIMMER_TEST_DEMO_DIR; skips with a line without it.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use safetensors::SafeTensors;
use serde::Deserialize;
use shimmer_coordinator::{
    chat_template::{ChatMessage, ChatTemplate, RenderOptions},
    prediction::Recall,
    sampler::Sampling,
};
use shimmer_kernels::WeightFormat;
use shimmer_model::NumericClass;
use shimmer_tests::{
    cluster::{Cluster, ClusterOptions},
    in_process::{InProcess, InProcessOptions},
    models::make_container,
    quality::{best, compare, log_sum_exp, perplexity},
    reference::ops::count,
    workload::{Job, Outcome},
};
use shimmer_worker::TierOptions;
use tempfile::TempDir;

/// Largest allowed difference of one of the recorded logits.
const LOGIT_BOUND: f64 = 5e-4;

/// The best token may differ where the two best are closer than this.
const TOP1_MARGIN: f32 = 1e-3;

/// The recorded logits: the 32 largest of each position.
#[derive(Debug)]
struct Recorded {
    ids: Vec<u32>,
    top_ids: Vec<Vec<u32>>,
    top_logits: Vec<Vec<f32>>,
    log_sum_exp: Vec<f32>,
}

/// One recorded chat, by its user message.
#[derive(Debug, Deserialize)]
struct Answer {
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    text: String,
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/smol-glm4moe").join(name))
        .unwrap()
}

fn recorded() -> Recorded {
    let bytes = fixture("oracle-f32.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        file.tensor(name)
            .unwrap()
            .data()
            .chunks_exact(4)
            .map(|word| word.try_into().unwrap())
            .collect()
    };
    let ids = |name: &str| words(name).into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
    let floats = |name: &str| words(name).into_iter().map(f32::from_le_bytes).collect::<Vec<_>>();
    Recorded {
        ids: ids("ids"),
        top_ids: ids("top_ids").chunks_exact(32).map(<[u32]>::to_vec).collect(),
        top_logits: floats("top_logits").chunks_exact(32).map(<[f32]>::to_vec).collect(),
        log_sum_exp: floats("logsumexp"),
    }
}

impl Recorded {
    /// Mean KL(recorded || ours), with all tokens outside the recorded ones as one.
    fn mean_kl(&self, logits: &[Vec<f32>]) -> f64 {
        let of_position = |(position, ours): (usize, &Vec<f32>)| {
            let (of_theirs, of_ours) = (f64::from(self.log_sum_exp[position]), log_sum_exp(ours));
            let (mut sum, mut rest_theirs, mut rest_ours) = (0.0, 1.0, 1.0);
            for (&id, &theirs) in self.top_ids[position].iter().zip(&self.top_logits[position]) {
                let (p, q) =
                    (f64::from(theirs) - of_theirs, f64::from(ours[id as usize]) - of_ours);
                let (p_share, q_share) = (libm::exp(p), libm::exp(q));
                sum += p_share * (p - q);
                rest_theirs -= p_share;
                rest_ours -= q_share;
            }
            sum + rest_theirs * libm::log(rest_theirs / rest_ours)
        };
        logits.iter().enumerate().map(of_position).sum::<f64>() / count(logits.len())
    }

    fn top1(&self, logits: &[Vec<f32>]) -> f64 {
        let agreeing = logits
            .iter()
            .zip(&self.top_ids)
            .filter(|(ours, theirs)| best(ours) == theirs[0] as usize);
        count(agreeing.count()) / count(logits.len())
    }

    /// Every recorded logit is met, and so is the best token.
    fn check(&self, logits: &[Vec<f32>]) {
        let mut worst: f64 = 0.0;
        for (position, ours) in logits.iter().enumerate() {
            let (ids, theirs) = (&self.top_ids[position], &self.top_logits[position]);
            for (&id, &theirs) in ids.iter().zip(theirs) {
                worst = worst.max(f64::from(ours[id as usize] - theirs).abs());
            }
            let close = theirs[0] - theirs[1] < TOP1_MARGIN;
            assert!(
                close || best(ours) == ids[0] as usize,
                "position {position}: the best token differs"
            );
        }
        println!("largest difference from transformers {worst:.1e}");
        assert!(worst <= LOGIT_BOUND, "a logit is {worst:e} from transformers");
    }
}

fn checkpoint() -> Option<PathBuf> {
    let directory = env::var_os("SHIMMER_TEST_DEMO_DIR").map(PathBuf::from);
    if directory.is_none() {
        println!("skipped: SHIMMER_TEST_DEMO_DIR does not name the demo checkpoint");
    }
    directory
}

/// Greedy chat answers, word for word, through the container's own template and tokenizer.
fn check_answers(engine: &InProcess) {
    let answers: BTreeMap<String, Answer> =
        serde_json::from_slice(&fixture("oracle-greedy.json")).unwrap();
    let (container, tokenizer) = (engine.container(), engine.tokenizer());
    let (template, config) =
        (container.chat_template().unwrap(), container.tokenizer_config().unwrap());
    let template =
        ChatTemplate::from_files(template.as_deref(), config.as_deref()).unwrap().unwrap();
    for (question, answer) in answers {
        let messages = [ChatMessage::new("user", question.as_str())];
        let (prompt, _) =
            template.encode_chat(tokenizer, &messages, &RenderOptions::default()).unwrap();
        assert_eq!(prompt, answer.prompt_ids, "prompt of {question:?}");
        let max_tokens = u32::try_from(answer.greedy_ids.len()).unwrap();
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let outcome = engine.run(&Job { prompt, max_tokens, sampling });
        assert_eq!(outcome.tokens, answer.greedy_ids, "answer to {question:?}");
        assert_eq!(tokenizer.decode(&outcome.tokens, true), answer.text, "answer to {question:?}");
    }
}

/// Two worker processes give the bytes of the one inside this process, at the widths of a real model.
fn check_two_processes(container: &Path, engine: &InProcess, ids: &[u32]) {
    let sampling = Sampling { temperature: 0.7, top_p: 0.95, seed: 3, ..Sampling::default() };
    let job = |prompt: &[u32]| Job {
        prompt: prompt.to_vec(),
        max_tokens: 12,
        sampling: sampling.clone(),
    };
    let jobs = [job(ids), job(&ids[..1])];
    let cluster = Cluster::start(&ClusterOptions::new(container, 2));
    let found = cluster.generate_together(jobs.iter().map(Job::request).collect()).unwrap();
    let found: Vec<Outcome> = found.into_iter().map(Outcome::from).collect();
    assert_eq!(found, engine.run_together(&jobs), "two worker processes have other bytes");
}

#[test]
fn demo_model_agrees_with_transformers_and_stands_quantisation() {
    let Some(checkpoint) = checkpoint() else { return };
    let containers = TempDir::new().unwrap();
    let recorded = recorded();
    let score = |name: &str, class: NumericClass| {
        let engine =
            InProcess::start(&make_container(&checkpoint, &containers.path().join(name), class));
        (engine.score(&recorded.ids), engine)
    };

    let (exact, engine) = score("bf16", NumericClass::uniform(WeightFormat::Bf16));
    recorded.check(&exact);
    check_answers(&engine);
    drop(engine);

    let q8 = NumericClass::uniform(WeightFormat::Q8G64);
    let exact_perplexity = perplexity(&exact, &recorded.ids);
    let measure = |name: &str, class: NumericClass| {
        let (logits, engine) = score(name, class);
        let comparison = compare(&exact, &logits);
        let perplexity = perplexity(&logits, &recorded.ids) / exact_perplexity - 1.0;
        println!(
            "{class}: KL {:.2e} (from transformers' recorded logits {:.2e}), top-1 {:.1} % ({:.1} %), perplexity {:+.2} %",
            comparison.mean_kl,
            recorded.mean_kl(&logits),
            comparison.top1 * 100.0,
            recorded.top1(&logits) * 100.0,
            perplexity * 100.0
        );
        (comparison, perplexity, engine)
    };
    let (comparison, perplexity, engine) = measure("q8", q8);
    assert!(comparison.top1 >= 0.95, "8-bit class: top-1 {}", comparison.top1);
    assert!(comparison.mean_kl <= 5e-3, "8-bit class: KL {}", comparison.mean_kl);
    assert!(perplexity.abs() <= 0.01, "8-bit class: perplexity {perplexity}");
    check_two_processes(&containers.path().join("q8"), &engine, &recorded.ids);
    let (comparison, ..) = measure("q4", NumericClass { experts: WeightFormat::Q4G64, ..q8 });
    assert!(comparison.mean_kl <= 1.6e-2, "4-bit experts: KL {}", comparison.mean_kl);
}

/// Chance is the share of a layer's experts that a token takes.
#[test]
fn predictions_on_real_weights_beat_chance_and_the_token_before() {
    let Some(checkpoint) = checkpoint() else { return };
    let directory = TempDir::new().unwrap();
    let container =
        make_container(&checkpoint, &directory.path().join("q8"), NumericClass::default());
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let job = Job { prompt: recorded().ids[..40].to_vec(), max_tokens: 40, sampling: greedy };
    let expected = InProcess::start(&container).run(&job);
    let tiers = TierOptions { cap: Some(4), ..TierOptions::default() };
    let options = InProcessOptions { tiers, ..InProcessOptions::new(&container) };
    let engine = InProcess::with_options(&options);
    assert_eq!(engine.run(&job), expected, "hints change no byte");
    let Recall { rows, steps, previous } = engine.engine().stats().recall;
    let shares = [rows, steps, previous].map(|overlap| overlap.recall().unwrap());
    println!(
        "recall by row {:.3}, by step {:.3}; the token before {:.3}",
        shares[0], shares[1], shares[2]
    );
    let config = engine.container().config();
    let top_k = count(config.gating.as_ref().unwrap().top_k);
    let experts = f64::from(config.moe_layers().map(|(_, experts)| experts).min().unwrap());
    assert!(shares[0] > 2.0 * top_k / experts, "chance is {}", top_k / experts);
    assert!(shares[0] > shares[2] && shares[1] > shares[2]);
}

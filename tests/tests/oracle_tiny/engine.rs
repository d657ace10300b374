//! The engine, in float and integer classes.

use shimmer_coordinator::sampler::Sampling;
use shimmer_kernels::WeightFormat;
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    in_process::InProcess, models::TinyModel, quality, random, reference::Model, workload::Job,
};

use super::{F32_BOUND, largest_difference, recorded};

/// The bound of [`F32_BOUND`] with bf16 weights.
const BF16_BOUND: f64 = 1e-4;

fn check_engine(preset: Preset) {
    let (name, recorded, model) = (preset.name(), recorded(preset), TinyModel::new(preset));
    let long = random::tokens(7, 300, 256);
    let expected_long = Model::open(&model.checkpoint()).forward(&long).logits;
    for (format, bound) in [(WeightFormat::F32, F32_BOUND), (WeightFormat::Bf16, BF16_BOUND)] {
        let engine = InProcess::start(&model.container(NumericClass::uniform(format)));
        let worst = largest_difference(&recorded, &engine.score(&recorded.ids));
        assert!(worst <= bound, "{name}, {format}: {worst:e} from transformers, allowed {bound:e}");

        // Past 256 positions attention folds blocks; only the reference reaches that far.
        let logits = engine.score(&long);
        let pairs = logits.iter().flatten().zip(expected_long.iter().flatten());
        let worst =
            pairs.map(|(ours, theirs)| (f64::from(*ours) - theirs).abs()).fold(0.0, f64::max);
        assert!(
            worst <= bound,
            "{name}, {format}: {worst:e} from the reference, allowed {bound:e}"
        );

        let max_tokens = u32::try_from(recorded.greedy.len()).unwrap();
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let outcome = engine.run(&Job { prompt: recorded.ids.clone(), max_tokens, sampling });
        assert_eq!(outcome.tokens, recorded.greedy, "{name}, {format}: greedy tokens");
    }
}

#[test]
fn glm4_moe_agrees_with_transformers() {
    check_engine(Preset::Glm4Moe);
    check_engine(Preset::Glm4MoeGroups);
}

#[test]
fn qwen3_moe_agrees_with_transformers() {
    check_engine(Preset::Qwen3Moe);
    check_engine(Preset::Qwen3MoeTied);
}

#[test]
fn mixtral_agrees_with_transformers() {
    check_engine(Preset::Mixtral);
}

#[test]
fn olmoe_agrees_with_transformers() {
    check_engine(Preset::Olmoe);
}

/// Weights of these models are noise, which quantises worst; the bound catches a lost scale, not a fine point.
#[test]
fn integer_classes_stay_close() {
    for preset in Preset::ALL {
        let (ids, model) = (recorded(preset).ids, TinyModel::new(preset));
        let score = |class| InProcess::start(&model.container(class)).score(&ids);
        let exact = score(NumericClass::uniform(WeightFormat::F32));
        for (experts, bound) in [(WeightFormat::Q8G64, 0.02), (WeightFormat::Q4G64, 0.2)] {
            let class = NumericClass { experts, ..NumericClass::uniform(WeightFormat::Q8G64) };
            let comparison = quality::compare(&exact, &score(class));
            assert!(comparison.mean_kl <= bound, "{}, {class}: {comparison:?}", preset.name());
        }
    }
}

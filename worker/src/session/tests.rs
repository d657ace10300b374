use shimmer_kernels::{ActivationRows, Isa, Kernels, WeightFormat};
use shimmer_model::{Container, tiny::Preset};
use shimmer_proto::expert::v1::{ActivationFormat, Fence, LayerExperts, expert_result::Payload};

use super::*;
use crate::{
    CountersSnapshot, WorkerConfig,
    store::NoProgress,
    testing,
    tier_options::{RamSetting, TierOptions},
};

const LAYER: u32 = 1;

fn session(container: &Arc<Container>, threads: usize, isa: Option<Isa>) -> ExpertSession {
    session_with(container, threads, isa, TierOptions::default())
}

fn session_with(
    container: &Arc<Container>,
    threads: usize,
    isa: Option<Isa>,
    tiers: TierOptions,
) -> ExpertSession {
    let mut session = core(container, threads, isa, tiers).session();
    let layers = container.config().moe_layers();
    let layers =
        layers.map(|(layer, n)| LayerExperts { layer, experts: (0..n).collect() }).collect();
    session.assign(&Assign { epoch: 5, generation: 2, layers }, &NoProgress).unwrap();
    session
}

fn core(
    container: &Arc<Container>,
    threads: usize,
    isa: Option<Isa>,
    tiers: TierOptions,
) -> Arc<ExpertCore> {
    let config = WorkerConfig {
        id: "w".to_owned(),
        host: String::new(),
        coordinators: 8,
        weight: 1.0,
        tiers,
        threads,
        pool: None,
        build: "test".to_owned(),
    };
    ExpertCore::new(Arc::clone(container), Kernels::new(isa).unwrap(), config).unwrap()
}

/// Every expert on some of the rows; `per_row` experts of each row on average.
fn work(session: &ExpertSession, experts: &[u32], rows: u32, stride: u32) -> ExpertWork {
    let core = session.core();
    let hidden = core.hidden();
    let value = |index: usize| f32::from(u16::try_from(index * 7919 % 509).unwrap()) / 254.5 - 1.0;
    let x: Vec<f32> = (0..rows as usize * hidden).map(value).collect();
    let mut activations = ActivationRows::new();
    activations.set(core.kernels(), core.format(), &x, rows as usize, hidden);
    let mut wire = Vec::new();
    activations.write_wire(&mut wire);
    let mut work = ExpertWork {
        fence: Some(Fence { epoch: 5, generation: 2, step: 1, layer: LAYER, attempt: 0, part: 0 }),
        format: core.wire_format().into(),
        row_count: rows,
        rows: wire.into(),
        experts: experts.to_vec(),
        ..ExpertWork::default()
    };
    for &expert in experts {
        let taken: Vec<u32> =
            (0..rows).filter(|row| (row + expert) % stride == 0 || *row == expert % rows).collect();
        work.item_rows.push(u32::try_from(taken.len()).unwrap());
        work.gates.extend(
            taken.iter().map(|row| 0.0625 * f32::from(u16::try_from(row % 15 + 1).unwrap())),
        );
        work.row_indices.extend(taken);
    }
    checksum::seal_work(&mut work);
    work
}

/// The exact sums that a payload stands for.
fn sums(session: &ExpertSession, work: &ExpertWork, payload: &Payload) -> Vec<i64> {
    let hidden = session.core().hidden();
    match payload {
        Payload::Accumulators(bytes) => {
            bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
        }
        Payload::Outputs(bytes) => {
            let values: Vec<f32> =
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let mut sums = vec![0; work.row_count as usize * hidden];
            for ((output, &row), &gate) in
                values.chunks_exact(hidden).zip(&work.row_indices).zip(&work.gates)
            {
                let row = &mut sums[row as usize * hidden..][..hidden];
                shimmer_kernels::combine::accumulate(row, gate, output).unwrap();
            }
            sums
        }
    }
}

#[test]
fn threads_instruction_sets_and_pools_do_not_change_a_byte() {
    for format in [WeightFormat::Q8G64, WeightFormat::F32] {
        let (_dir, container) = testing::container(Preset::Qwen3Moe, format);
        let mut reference = session(&container, 1, Some(Isa::Scalar));
        let mut others = [session(&container, 1, None), session(&container, 3, None)];
        let experts: Vec<u32> = (0..13).collect();
        for (rows, stride) in [(1, 1), (3, 2), (70, 3), (300, 40)] {
            let work = work(&reference, &experts, rows, stride);
            let expected = reference.work(&work).unwrap().payload;
            for other in &mut others {
                assert_eq!(other.work(&work).unwrap().payload, expected, "{format}, {rows} rows");
            }
        }
    }
}

#[test]
fn where_experts_lie_does_not_change_a_byte() {
    let (_dir, container) = testing::container(Preset::Qwen3Moe, WeightFormat::Q8G64);
    let mut resident = session(&container, 2, None);
    let experts: Vec<u32> = (0..13).collect();
    for (cap, pipeline) in [(1, true), (2, true), (5, true), (1, false), (5, false)] {
        let tiers = TierOptions { cap: Some(cap), pipeline, ..TierOptions::default() };
        let mut tiered = session_with(&container, 2, None, tiers);
        for (rows, stride) in [(1, 1), (3, 2), (70, 3)] {
            let work = work(&resident, &experts, rows, stride);
            let expected = resident.work(&work).unwrap();
            assert_eq!(expected.ram_hits, 13);
            let found = tiered.work(&work).unwrap();
            assert_eq!(found.payload, expected.payload, "{cap} slots, {rows} rows");
            assert!(found.ram_hits <= cap);
            assert!(tiered.try_work(&work, Instant::now()).is_none(), "it would have to wait");
        }
    }
}

#[test]
fn an_expert_that_cannot_be_read_refuses_its_work_alone() {
    let (_dir, container) = testing::container(Preset::Qwen3Moe, WeightFormat::Q8G64);
    let entry = container.expert_entry(LAYER, 3).unwrap();
    let path = container.dir().join(&entry.file);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[usize::try_from(entry.offset).unwrap() + 100] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let tiers = TierOptions { cap: Some(2), ..TierOptions::default() };
    let mut session = session_with(&container, 2, None, tiers);
    for _ in 0..3 {
        let refused = session.work(&work(&session, &[1, 3, 5], 2, 1)).unwrap_err();
        assert_eq!((refused.code(), refused.expert), (ErrorCode::Load, Some(3)));
        assert!(refused.fence.is_some() && !refused.fatal, "{refused:?}");
        session.work(&work(&session, &[0, 1, 2, 4, 5], 2, 1)).unwrap();
    }
    assert_eq!(session.core().counters().snapshot().work_not_loaded, 3);
    let test = session.self_test(LAYER, 3).unwrap_err();
    assert_eq!(test.code(), ErrorCode::Load);
}

#[test]
fn the_smaller_payload_is_sent_and_both_mean_the_same() {
    let (_dir, container) = testing::container(Preset::Qwen3Moe, WeightFormat::Q8G64);
    let mut session = session(&container, 1, None);
    let all = work(&session, &[0, 1, 2, 3], 4, 1);
    let result = session.work(&all).unwrap();
    let Some(Payload::Accumulators(_)) = &result.payload else {
        panic!("four experts a row make sums smaller")
    };
    let together = sums(&session, &all, result.payload.as_ref().unwrap());
    let mut apart = vec![0; together.len()];
    for expert in 0..4 {
        let mut one = work(&session, &[expert], 4, 1);
        let at = all.item_rows[..expert as usize].iter().sum::<u32>() as usize;
        one.gates.copy_from_slice(&all.gates[at..at + 4]);
        checksum::seal_work(&mut one);
        let result = session.work(&one).unwrap();
        let Some(Payload::Outputs(_)) = &result.payload else {
            panic!("one expert a row makes outputs smaller")
        };
        for (sum, term) in
            apart.iter_mut().zip(sums(&session, &one, result.payload.as_ref().unwrap()))
        {
            *sum += term;
        }
    }
    assert_eq!(together, apart);
}

#[test]
fn self_tests_match_the_manifest() {
    let (_dir, container) = testing::container(Preset::Glm4Moe, WeightFormat::Q4G64);
    let mut session = session(&container, 2, None);
    for (layer, experts) in container.config().moe_layers() {
        for expert in 0..experts {
            let found = session.self_test(layer, expert).unwrap();
            let expected = &container.expert_entry(layer, expert).unwrap().self_test;
            let found: String = found.digest.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(&found, expected, "expert {expert} of layer {layer}");
        }
    }
    assert_eq!(session.self_test(0, 0).unwrap_err().code(), ErrorCode::NotOwned);
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    let (_dir, container) = testing::container(Preset::Glm4Moe, WeightFormat::Q8G64);
    let good = WorkerConfig {
        id: "w".to_owned(),
        host: String::new(),
        coordinators: 8,
        weight: 1.0,
        tiers: TierOptions::default(),
        threads: 1,
        pool: None,
        build: "test".to_owned(),
    };
    let check = |config: WorkerConfig, expected: &str| {
        let error = ExpertCore::new(Arc::clone(&container), Kernels::new(None).unwrap(), config)
            .unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(WorkerConfig { id: String::new(), ..good.clone() }, "setting id is");
    check(WorkerConfig { id: "two words".to_owned(), ..good.clone() }, "setting id is two words");
    check(WorkerConfig { weight: f64::NAN, ..good.clone() }, "setting weight is NaN");
    check(WorkerConfig { weight: -1.0, ..good.clone() }, "setting weight is -1");
    check(WorkerConfig { threads: 0, ..good.clone() }, "setting threads is 0");
    let tiers = TierOptions { ram: RamSetting::Bytes(u64::MAX), ..TierOptions::default() };
    check(WorkerConfig { tiers, ..good }, "does not fit");
}

#[test]
fn the_wire_format_is_the_one_of_the_class() {
    for (format, expected) in [
        (WeightFormat::Q4G64, ActivationFormat::A8g64),
        (WeightFormat::Bf16, ActivationFormat::F32),
    ] {
        let (_dir, container) = testing::container(Preset::Olmoe, format);
        assert_eq!(session(&container, 1, None).core().wire_format(), expected);
    }
}

#[test]
fn hints_are_checked_dropped_and_counted() {
    let (_dir, container) = testing::container(Preset::Glm4Moe, WeightFormat::Q8G64);
    let session = session(&container, 1, None);
    let counters = session.core().counters();
    let last = container.config().moe_layers().last().unwrap();
    let check = |change: &dyn Fn(&mut PrefetchHint), expected: fn(&CountersSnapshot) -> u64| {
        let mut hint = PrefetchHint {
            fence: Some(Fence { epoch: 5, generation: 2, step: 1, layer: 0, attempt: 0, part: 0 }),
            layer: last.0,
            experts: vec![3, 0],
            ..PrefetchHint::default()
        };
        checksum::seal_hint(&mut hint);
        let sealed = hint.clone();
        change(&mut hint);
        if hint.checksum == sealed.checksum {
            checksum::seal_hint(&mut hint);
        }
        let before = counters.snapshot();
        session.hint(&hint);
        let after = counters.snapshot();
        assert_eq!(expected(&after), expected(&before) + 1, "{hint:?}");
        let total = |s: &CountersSnapshot| s.entries().map(|(_, value)| value).sum::<u64>();
        assert_eq!(total(&after), total(&before) + 1, "counted once");
    };
    check(&|_| (), |c| c.hints_taken);
    check(&|h| h.checksum ^= 1, |c| c.hints_corrupt);
    let fenced =
        |change: fn(&mut Fence)| move |h: &mut PrefetchHint| change(h.fence.as_mut().unwrap());
    check(&fenced(|f| f.epoch += 1), |c| c.hints_stale);
    check(&fenced(|f| f.generation -= 1), |c| c.hints_stale);
    check(&fenced(|f| f.layer = u32::MAX), |c| c.hints_malformed);
    check(&|h| h.fence = None, |c| c.hints_malformed);
    check(&|h| h.fence.as_mut().unwrap().layer = h.layer, |c| c.hints_malformed);
    check(&|h| h.layer = 99, |c| c.hints_malformed);
    check(&|h| h.experts.clear(), |c| c.hints_malformed);
    check(&|h| h.experts = vec![0; 65], |c| c.hints_malformed);
    check(&|h| h.experts[1] = last.1, |c| c.hints_malformed);
    check(&|h| h.experts[1] = u32::MAX, |c| c.hints_malformed);

    let unassigned = session.core().session();
    let mut hint = PrefetchHint { experts: vec![1], ..PrefetchHint::default() };
    hint.fence = Some(Fence::default());
    checksum::seal_hint(&mut hint);
    unassigned.hint(&hint);
    assert_eq!(counters.snapshot().hints_stale, 3);
    let mut partly = session.core().session();
    let layers = vec![LayerExperts { layer: last.0, experts: vec![0, 1] }];
    partly.assign(&Assign { epoch: 0, generation: 0, layers }, &NoProgress).unwrap();
    for (experts, not_owned) in [(vec![1, 0], 0), (vec![1, 2], 1)] {
        let mut hint = PrefetchHint { layer: last.0, experts, ..hint.clone() };
        checksum::seal_hint(&mut hint);
        partly.hint(&hint);
        assert_eq!(counters.snapshot().hints_not_owned, not_owned);
    }
}

#[test]
fn a_worker_whose_first_assignment_is_empty_is_not_in_service_until_the_next_is_loaded() {
    let (_dir, container) = testing::container(Preset::Qwen3Moe, WeightFormat::Q8G64);
    let core = core(&container, 1, None, TierOptions::default());
    assert_eq!(core.unready(Instant::now()), None, "nobody has greeted it");
    let mut session = core.session();
    let identity = Some(core.identity());
    session.greet(&CoordinatorHello { identity, ..CoordinatorHello::default() }).unwrap();
    let waits = |core: &ExpertCore| core.unready(Instant::now()).unwrap_or_default();
    assert!(waits(&core).starts_with("joining"), "a placement is to come");
    let assign = |generation, layers| Assign { epoch: 5, generation, layers };
    session.assign(&assign(2, Vec::new()), &NoProgress).unwrap();
    assert!(waits(&core).starts_with("joining"), "the placement went on without it");
    let layers = vec![LayerExperts { layer: LAYER, experts: vec![0] }];
    let loading = session.begin_assign(&assign(3, layers)).unwrap();
    assert!(waits(&core).starts_with("loading"), "an empty assignment serves nobody");
    let loaded = loading.run(&NoProgress);
    session.loaded(loaded).unwrap().unwrap();
    assert_eq!(core.unready(Instant::now()), None);
    // The next placement may do without it: it has served, and is not new.
    session.assign(&assign(4, Vec::new()), &NoProgress).unwrap();
    assert_eq!(core.unready(Instant::now()), None);
}

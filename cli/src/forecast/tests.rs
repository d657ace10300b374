use proptest::prelude::*;
use shimmer_coordinator::placement::PlacedLayer;
use shimmer_worker::{
    TierOptions,
    budget::{BudgetTerm, RamBudget},
    residency::Rules,
};

use super::{replay::Share, trace::LayerUse, *};

const ONE_HOST: &str = r#"
[network]
round-trip-ms = 0.2
bandwidth-gb-per-s = 1.25

[coordinator]
host = "a"

[[host]]
name = "a"

[[host.worker]]
id = "w0"
ram = "1GiB"
cap = 2

[[host.worker]]
id = "w1"
weight = 3.0
ram = "1GiB"
"#;

fn refused(change: impl FnOnce(String) -> String, part: &str) {
    match Hosts::parse(&change(ONE_HOST.to_owned())) {
        Err(error) => assert!(error.contains(part), "{error:?} lacks {part:?}"),
        Ok(hosts) => panic!("{hosts:?} instead of {part:?}"),
    }
}

#[test]
fn a_file_of_hosts_is_read_or_refused_by_key() {
    let hosts = Hosts::parse(ONE_HOST).unwrap();
    let workers: Vec<_> =
        hosts.workers().map(|(host, worker)| (host, worker.id.as_str())).collect();
    assert_eq!(workers, [(0, "w0"), (0, "w1")]);
    let replaced =
        |from: &'static str, to: &'static str| move |text: String| text.replace(from, to);
    refused(replaced("cap = 2", "slots = 2"), "line 15: unknown field `slots`");
    refused(replaced("cap = 2", "cap = 0"), "line 15: ");
    refused(replaced("\"w1\"", "\"w0\""), "worker.id: w0 stands twice");
    refused(replaced("host = \"a\"", "host = \"b\""), "coordinator.host: no host is called b");
    refused(
        replaced("weight = 3.0", "weight = 0.0"),
        "worker w1: weight: 0 is not a number above 0",
    );
    refused(replaced("= 1.25", "= 0.0"), "network.bandwidth-gb-per-s");
    refused(replaced("= 0.2", "= -1.0"), "network.round-trip-ms: -1 is not a number of 0 or more");
    refused(replaced("= 0.2", "= nan"), "network.round-trip-ms");
    refused(replaced("1GiB", "much"), "much");
    refused(replaced("cap = 2", "vram = [\"1GiB\"]"), "come together");
    refused(|text| text.split("[[host]]").next().unwrap().to_owned(), "missing field `host`");
    let both = "name = \"a\"\nexpert-rate = 5.0\nmemory-bandwidth-gb-per-s = 9.0";
    refused(replaced("name = \"a\"", both), "keep the measured one");
    refused(|text| format!("{text}\n[[host]]\nname = \"a\""), "host.name: a stands twice");
    refused(|text| text.split("[[host.worker]]").next().unwrap().to_owned(), "no worker");
}

proptest! {
    #[test]
    fn no_text_makes_the_parsers_panic(text in "\\PC*", at in 0..ONE_HOST.len(), noise in "\\PC{0,8}") {
        drop(Hosts::parse(&text));
        drop(Trace::parse(&text));
        let mut mixed = ONE_HOST.to_owned();
        mixed.insert_str(at, &noise);
        match Hosts::parse(&mixed) {
            Ok(hosts) => prop_assert!(hosts.workers().next().is_some()),
            Err(error) => prop_assert!(!error.is_empty()),
        }
    }

    #[test]
    fn an_unknown_key_is_refused_wherever_it_stands(key in "zz-[a-z]{1,8}", line in 1..16_usize) {
        let mut lines: Vec<String> = ONE_HOST.lines().map(str::to_owned).collect();
        lines.insert(line, format!("{key} = 1"));
        let error = Hosts::parse(&lines.join("\n")).unwrap_err();
        prop_assert!(error.contains(&key), "{error}");
    }

    #[test]
    fn a_trace_comes_back_as_it_was_written(prompt in 1..40_u32, decode in 0..9_u32, seed: u64) {
        let trace = uniform(prompt, decode, seed);
        prop_assert_eq!(Trace::parse(&trace.to_json_lines()).unwrap(), trace);
    }

    #[test]
    fn a_curve_lies_between_its_points(at in 1.0..300.0_f64) {
        let curve = Curve { rows: vec![1.0, 16.0, 64.0], seconds: vec![1.0, 4.0, 4.0] };
        let found = curve.at(at);
        prop_assert!((1.0..=4.0).contains(&found), "{found}");
    }
}

const LAYERS: [(u32, u32); 2] = [(1, 8), (2, 8)];

fn uniform(prompt: u32, decode: u32, seed: u64) -> Trace {
    Trace::uniform(&Shape { layers: &LAYERS, top_k: 2, prompt, chunk: 16, decode, batch: 1, seed })
}

#[test]
fn an_assumed_routing_has_every_row_of_every_step() {
    let trace = uniform(40, 3, 7);
    let rows: Vec<u32> = trace.steps().map(|lines| lines[0].rows).collect();
    assert_eq!(rows, [16, 16, 8, 1, 1, 1]);
    assert_eq!(trace.prompt(), 40);
    for line in &trace.lines {
        let uses: u32 = line.experts.iter().map(|(_, rows)| rows).sum();
        assert_eq!(uses, 2 * line.rows, "{line:?}");
    }
    assert_eq!(trace, uniform(40, 3, 7));
    assert_ne!(trace, uniform(40, 3, 8));
    assert_eq!(uniform(1, 3, 7).prompt(), 1);
}

#[test]
fn a_line_of_a_trace_is_refused_by_number() {
    let good = r#"{"step":4,"layer":1,"rows":2,"experts":[[3,2],[5,1]]}"#;
    assert_eq!(
        Trace::parse(&format!("{good}\n\n")).unwrap().lines,
        [LayerUse { step: 4, layer: 1, rows: 2, experts: vec![(3, 2), (5, 1)] }]
    );
    for (bad, part) in [
        ("", "no line"),
        (r#"{"step":3,"layer":1,"rows":1,"experts":[]}"#, "line 2: steps do not ascend"),
        (r#"{"step":4,"layer":1,"rows":0,"experts":[]}"#, "line 2: 0 rows"),
        (r#"{"step":4,"layer":1,"rows":1,"experts":[[1,2]]}"#, "line 2: an expert has more rows"),
        (
            r#"{"step":4,"layer":1,"rows":1,"experts":[[2,1],[1,1]]}"#,
            "line 2: experts do not ascend",
        ),
        (r#"{"step":4,"layer":1,"rows":1,"experts":[],"more":1}"#, "line 2: unknown field"),
    ] {
        let text = if bad.is_empty() { String::new() } else { format!("{good}\n{bad}") };
        let error = Trace::parse(&text).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    let trace = Trace::parse(good).unwrap();
    assert!(trace.check(&[(1, 6)]).is_ok());
    assert!(trace.check(&[(1, 5)]).unwrap_err().contains("expert 5 of layer 1"));
    assert!(trace.check(&[(2, 9)]).unwrap_err().contains("layer 1"));
}

#[test]
fn a_curve_is_straight_between_its_points_and_grows_beyond_them() {
    let curve = Curve { rows: vec![1.0, 16.0, 64.0], seconds: vec![1.0, 4.0, 10.0] };
    for (rows, seconds) in
        [(0.5, 1.0), (1.0, 1.0), (8.5, 2.5), (16.0, 4.0), (64.0, 10.0), (128.0, 18.0)]
    {
        assert!((curve.at(rows) - seconds).abs() < 1e-9, "{rows}: {}", curve.at(rows));
    }
    let falling = Curve { rows: vec![1.0, 2.0], seconds: vec![5.0, 3.0] };
    assert!((falling.at(9.0) - 3.0).abs() < 1e-9);
    let one = Curve { rows: vec![4.0], seconds: vec![2.0] };
    assert!((one.at(8.0) - 4.0).abs() < 1e-9);
    assert!(Curve::default().at(3.0).abs() < 1e-9);
    let points = [(1.0, 1.0), (1.2, 9.0), (4.0, 2.0), (3.0, 9.0)];
    assert_eq!(Curve::through(points.into_iter()).rows, [1.0, 4.0]);
}

fn layers() -> Vec<PlacedLayer> {
    let layer = |(layer, experts)| PlacedLayer { layer, experts, slab_bytes: 1000 };
    LAYERS.into_iter().map(layer).collect()
}

/// Every worker of a file placed, with memory for everything.
fn placed(hosts: &Hosts) -> Placed {
    let workers: Vec<_> = hosts.workers().map(|(_, worker)| worker).collect();
    let budget = RamBudget { bytes: 1 << 20, term: BudgetTerm::Setting };
    let options: Vec<TierOptions> = workers
        .iter()
        .map(|worker| TierOptions {
            cap: worker.cap.map(std::num::NonZeroU32::get),
            ..TierOptions::default()
        })
        .collect();
    place(hosts, &layers(), &[], &vec![budget; workers.len()], &options).unwrap()
}

#[test]
fn experts_go_to_tiers_as_the_worker_would_have_them() {
    let hosts = Hosts::parse(ONE_HOST).unwrap();
    let placed = placed(&hosts);
    let [w0, w1] = placed.workers.as_slice() else { panic!("two workers") };
    assert_eq!(w0.tiers.experts + w1.tiers.experts, 16);
    assert!(w1.tiers.all_resident(), "without a cap everything that fits is pinned");
    assert!(w0.tiers.layers.iter().all(|layer| layer.cache_slots <= 2), "{:?}", w0.tiers);
    let with_gpu = ONE_HOST
        .replace("cap = 2", "vram = [\"1000B\", \"1000B\"]\nvram-bandwidth-gb-per-s = 1000.0");
    let with_gpu = with_gpu.replace("1000B", "1KiB");
    let placed = self::placed(&Hosts::parse(&with_gpu).unwrap());
    assert_eq!((placed.workers[0].vram.len(), placed.workers[0].vram_bytes), (2, 2000));
    assert_eq!(placed.workers[0].tiers.experts + 2, w0.tiers.experts);
}

#[test]
fn a_cache_misses_what_was_used_longest_ago() {
    let layers = [PlacedLayer { layer: 1, experts: 8, slab_bytes: 1 }];
    let placed = alone(&layers, 2).unwrap();
    let memory = Memory::new(&placed.workers[0], &placed.placement, 0, &[(1, 8)], Rules::default());
    let line = |step, experts: &[u32]| LayerUse {
        step,
        layer: 1,
        rows: 1,
        experts: experts.iter().map(|expert| (*expert, 1)).collect(),
    };
    let trace = Trace {
        lines: vec![line(0, &[0, 1]), line(1, &[0]), line(2, &[2]), line(3, &[0]), line(4, &[1])],
    };
    let steps = replay(&trace, &placed.placement, &mut [memory]);
    let misses: Vec<u32> = steps.iter().map(|step| step.layers[0].shares[0].misses).collect();
    assert_eq!(misses, [2, 0, 1, 0, 1]);
    assert_eq!(
        steps[0].layers[0].shares,
        [Share { rows: vec![1, 1], gpu_rows: Vec::new(), misses: 2 }]
    );
}

#[test]
fn pinned_experts_are_never_read() {
    let layers = layers();
    let placed = alone(&layers, 8).unwrap();
    let memory = Memory::new(&placed.workers[0], &placed.placement, 0, &LAYERS, Rules::default());
    let steps = replay(&uniform(40, 20, 3), &placed.placement, &mut [memory]);
    let misses = steps.iter().flat_map(|step| &step.layers).flat_map(|layer| &layer.shares);
    assert_eq!(misses.map(|share| share.misses).sum::<u32>(), 0);
}

/// Costs of round numbers.
fn costs() -> Costs {
    Costs {
        container: String::new(),
        threads: 2,
        attention_decode_s: 0.001,
        attention_prefill_s: 0.0,
        trunk: Curve { rows: vec![1.0, 16.0], seconds: vec![1.0, 4.0] },
        expert: Curve { rows: vec![1.0, 9.0], seconds: vec![0.5, 0.9] },
        message: Curve { rows: vec![1.0, 16.0], seconds: vec![0.1, 0.25] },
        message_more: Curve { rows: vec![1.0, 16.0], seconds: vec![0.01, 0.01] },
        read: Curve { rows: vec![1.0, 16.0], seconds: vec![2.0, 1.0] },
    }
}

fn load(prompt: u32) -> Load {
    Load {
        trunk_bytes: 1_000_000,
        position_bytes: 100,
        row_bytes: 1_000_000,
        slabs: vec![(1, 1000), (2, 1000)],
        prompt,
        chunk: 16,
    }
}

/// One prompt step of 16 rows and one decode step, one layer; worker 0 misses one expert in each.
fn two_steps() -> Vec<Replayed> {
    let share = |rows: Vec<u32>, misses| Share { rows, gpu_rows: Vec::new(), misses };
    let step = |rows, shares| Replayed {
        rows,
        layers: vec![super::replay::LayerLoad { layer: 1, shares }],
    };
    vec![
        step(16, vec![share(vec![9], 1), share(vec![1, 1], 0)]),
        step(1, vec![share(vec![1], 1), share(Vec::new(), 0)]),
    ]
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9, "{found} instead of {expected}");
}

#[test]
fn times_add_up_on_one_host() {
    let hosts = Hosts::parse(ONE_HOST).unwrap();
    let placed = placed(&hosts);
    let found = predict(&two_steps(), &hosts, &placed.workers, &load(16), Some(&costs())).unwrap();
    // Workers of one host share its processors and drive.
    close(found.prefill.trunk, 4.0);
    close(found.prefill.compute, 0.9);
    close(found.prefill.memory, 1.0);
    // The larger message has nine rows.
    close(found.prefill.network, 0.18 + 0.01);
    close(found.prefill.drive, 1.0);
    assert_eq!((found.prefill.binding(), found.prefill_misses), ("trunk", 1));
    let decode = found.decode.unwrap();
    close(decode.trunk, 1.0 + 0.001 * 16.0);
    close(decode.memory, 0.5);
    close(decode.network, 0.1);
    close(decode.drive, 2.0);
    assert_eq!(decode.binding(), "drive");
    close(found.tokens_per_s.unwrap(), 1.0 / decode.total());
    close(found.decode_misses, 1.0);
}

/// Worker w1 on a host of its own.
fn two_hosts() -> String {
    ONE_HOST.replacen(
        "[[host.worker]]\nid = \"w1\"",
        "[[host]]\nname = \"b\"\n\n[[host.worker]]\nid = \"w1\"",
        1,
    )
}

#[test]
fn the_slowest_host_counts_and_a_far_one_pays_the_network() {
    let hosts = Hosts::parse(&two_hosts()).unwrap();
    let placed = placed(&hosts);
    let found = predict(&two_steps(), &hosts, &placed.workers, &load(16), Some(&costs())).unwrap();
    // Host a: one expert of nine rows and a read, 1.9 s; host b: 1 s, a round trip and two rows of a megabyte.
    close(found.prefill.compute, 0.9);
    close(found.prefill.memory, 0.0);
    close(found.prefill.drive, 1.0);
    close(found.prefill.network, 0.19);
    let mut steps = two_steps();
    steps[0].layers[0].shares[0].rows.clear();
    steps[0].layers[0].shares[0].misses = 0;
    let found = predict(&steps, &hosts, &placed.workers, &load(16), Some(&costs())).unwrap();
    close(found.prefill.memory, 1.0);
    close(found.prefill.network, 0.11 + 0.2e-3 + 2e6 / 1.25e9);
}

#[test]
fn a_read_costs_what_it_adds_to_a_step_of_as_many_rows() {
    let hosts = Hosts::parse(ONE_HOST).unwrap();
    let placed = placed(&hosts);
    let drive = |rows, prompt, costs: &Costs| {
        let mut steps = vec![two_steps()[0].clone()];
        steps[0].rows = rows;
        let found = predict(&steps, &hosts, &placed.workers, &load(prompt), Some(costs)).unwrap();
        if prompt > 0 { found.prefill.drive } else { found.decode.unwrap().drive }
    };
    close(drive(1, 1, &costs()), 2.0);
    close(drive(4, 4, &costs()), 1.8);
    close(drive(16, 16, &costs()), 1.0);
    // A step of decoding with several sequences has as much arithmetic to hide reads behind as one of a prompt.
    close(drive(4, 0, &costs()), 1.8);
    close(drive(400, 400, &costs()), 1.0);
}

#[test]
fn every_further_worker_costs_what_its_own_message_does() {
    let hosts = Hosts::parse(ONE_HOST).unwrap();
    let placed = placed(&hosts);
    let costs = Costs {
        message_more: Curve { rows: vec![1.0, 16.0], seconds: vec![0.01, 0.16] },
        ..costs()
    };
    let network = |first: Vec<u32>, second: Vec<u32>| {
        let mut steps = vec![two_steps()[0].clone()];
        steps[0].layers[0].shares[0].rows = first;
        steps[0].layers[0].shares[1].rows = second;
        let found = predict(&steps, &hosts, &placed.workers, &load(16), Some(&costs)).unwrap();
        found.prefill.network
    };
    // A row goes to a worker once, however many of its experts are there.
    close(network(vec![9, 9], vec![4]), 0.25 + 0.04);
    close(network(vec![4], vec![9, 9]), 0.25 + 0.04);
    close(network(vec![], vec![11]), 0.2);
    close(network(vec![], vec![]), 0.0);
}

#[test]
fn what_is_not_known_is_asked_for_by_name() {
    let check = |text: &str, costs: Option<&Costs>, expected: Result<(), &str>| {
        let hosts = Hosts::parse(text).unwrap();
        let placed = placed(&hosts);
        let found = predict(&two_steps(), &hosts, &placed.workers, &load(16), costs);
        match (found, expected) {
            (Ok(_), Ok(())) => {}
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (found, expected) => panic!("{found:?} instead of {expected:?}"),
        }
    };
    check(ONE_HOST, Some(&costs()), Ok(()));
    check(ONE_HOST, None, Err("host a: how fast is its trunk?"));
    let with = ONE_HOST.replace("name = \"a\"", "name = \"a\"\nmemory-bandwidth-gb-per-s = 20.0");
    check(&with, None, Err("worker w0: its experts do not fit into memory"));
    let with = with.replace("cap = 2", "cap = 2\nread-gb-per-s = 3.0");
    check(&with, None, Ok(()));
    let far = two_hosts().replace("name = \"a\"", "name = \"a\"\nmemory-bandwidth-gb-per-s = 20.0");
    check(&far, None, Err("host b: how fast are its experts?"));
}

#[test]
fn bandwidths_stand_in_for_what_was_not_measured() {
    let text = ONE_HOST
        .replace("name = \"a\"", "name = \"a\"\nmemory-bandwidth-gb-per-s = 1.0")
        .replace("cap = 2", "cap = 2\nread-gb-per-s = 0.001");
    let hosts = Hosts::parse(&text).unwrap();
    let placed = placed(&hosts);
    let found = predict(&two_steps(), &hosts, &placed.workers, &load(16), None).unwrap();
    let decode = found.decode.unwrap();
    close(decode.trunk, 1e-3 + 16.0 * 100.0 / 1e9);
    close(decode.memory, 1000.0 / 1e9);
    close(decode.drive, 1e-3);
    // A measured rate of experts goes before everything.
    let rated = text.replace("memory-bandwidth-gb-per-s = 1.0", "expert-rate = 10.0");
    let found = predict(
        &two_steps(),
        &Hosts::parse(&rated).unwrap(),
        &placed.workers,
        &load(16),
        Some(&costs()),
    );
    close(found.unwrap().decode.unwrap().memory, 0.1);
}

#[test]
fn a_calibration_is_read_as_it_was_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("here.toml");
    std::fs::write(&path, costs().to_toml()).unwrap();
    assert_eq!(Costs::read(&path).unwrap(), costs());
    let check = |from: &str, to: &str, part: &str| {
        std::fs::write(&path, costs().to_toml().replace(from, to)).unwrap();
        let error = Costs::read(&path).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("here.toml"), "{error}");
    };
    check("threads", "thread", "unknown field `thread`");
    check("decode-s = 0.001", "decode-s = -0.1", "attention-decode-s: -0.1 is no time");
    check("[0.1, 0.25]", "[0.1, -0.25]", "message: -0.25 is no time");
    check("[1.0, 16.0]", "[16.0, 1.0]", "trunk: rows ascend");
    assert!(Costs::read(&directory.path().join("none")).unwrap_err().to_string().contains("none"));
}

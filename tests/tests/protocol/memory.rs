//! A worker whose memory the kernel limits, with as many coordinators as it takes, each with long prompts.

use std::{path::Path, process::Command, sync::Arc};

use serde_json::Value;
use shimmer_model::{
    Container,
    tiny::{Preset, TinyOptions},
};
use shimmer_proto::{
    expert::v1::{
        Assign, ExpertWork, Fence, LayerExperts, SessionRequest, expert_result::Payload,
        session_request::Body as Ask, session_response::Body as Said,
    },
    limits,
};
use shimmer_tests::{
    control_group::MemoryGroup,
    process::{Process, shimmer_binary},
};
use shimmer_worker::budget::MessageShape;
use tempfile::TempDir;

use super::{
    bench::{self, SOON},
    raw::{RawClient, hello},
};

const COORDINATORS: usize = 6;
/// Works of a coordinator that are on their way at a time, and how often.
const AHEAD: u32 = 4;
const TIMES: u32 = 2;
const EXPERTS: u32 = 16;
const MIB: u64 = 1 << 20;

/// Wide rows, and experts of 20 MB in all.
fn container(dir: &Path) -> Arc<Container> {
    let sizes = [("hidden_size", 512), ("moe_intermediate_size", 256), ("num_experts", 16)];
    let config = sizes.into_iter().map(|(key, size)| (key.to_owned(), Value::from(size)));
    let options = TinyOptions { config: config.collect(), ..TinyOptions::default() };
    Arc::new(Container::open(&bench::make_container_with(dir, Preset::Qwen3Moe, &options)).unwrap())
}

fn flags(command: &str, container: &Container) -> Vec<String> {
    let coordinators = COORDINATORS.to_string();
    let container = container.dir().to_str().unwrap();
    let flags = ["--container", container, "--threads", "1", "--max-coordinators", &coordinators];
    [command].iter().chain(&flags).map(|&flag| flag.to_owned()).collect()
}

/// The terms of the worker's memory by kind.
fn planned(container: &Container) -> impl Fn(&str) -> u64 {
    let mut command = Command::new(shimmer_binary());
    let output = command.args(flags("plan", container)).arg("--json").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    move |kind| {
        let terms = plan["processes"][0]["terms"].as_array().unwrap();
        let of_kind = terms.iter().filter(|term| term["kind"] == kind);
        of_kind.map(|term| term["bytes"].as_u64().unwrap()).sum()
    }
}

/// What one coordinator hears for the same works again and again: all of them are sent before an answer is read.
fn coordinate(container: &Container, core: &shimmer_worker::ExpertCore, address: &str) -> Payload {
    let mut client = RawClient::open_at(address);
    client.ask(Ask::Hello(hello(core.identity())));
    let Ok(Some(Said::Hello(theirs))) = client.hear() else { panic!("expected a hello") };
    let rows = theirs.limits.unwrap().max_rows;
    let layers: Vec<u32> = container.config().moe_layers().map(|(layer, _)| layer).collect();
    let all = |&layer| LayerExperts { layer, experts: (0..EXPERTS).collect() };
    let layer = layers[0];
    client
        .assign(Assign { epoch: 1, generation: 1, layers: layers.iter().map(all).collect() })
        .unwrap();
    // A third of the rows go to each: no more pairs than rows have experts.
    let experts: Vec<u32> = (0..11).collect();
    let fence = Fence { epoch: 1, generation: 1, step: 1, layer, ..Fence::default() };
    let work = bench::work_of(container, fence, &experts, rows, 5);
    let mut answer = None;
    for _ in 0..TIMES {
        (0..AHEAD).for_each(|_| client.ask(Ask::Work(work.clone())));
        for _ in 0..AHEAD {
            let Ok(Some(Said::Result(result))) = client.hear() else { panic!("expected a result") };
            let payload = result.payload.unwrap();
            assert!(answer.get_or_insert_with(|| payload.clone()) == &payload, "other bytes");
        }
    }
    answer.unwrap()
}

#[test]
fn as_many_coordinators_as_it_takes_do_not_cost_a_worker_its_life() {
    let dir = TempDir::new().unwrap();
    let container = container(dir.path());
    let planned = planned(&container);
    // Room for a few experts. Were the messages of one coordinator all that is planned for, every expert would be pinned,
    // and those of the others would have no room.
    let limit = (planned("anonymous") + 5 * MIB) * 31 / 30 + planned("held") + 4 * MIB;
    let group = match MemoryGroup::new("coordinators", limit) {
        Ok(group) => group,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let mut args = flags("worker", &container);
    args.extend(["--listen", "127.0.0.1:0", "--id", "w"].map(str::to_owned));
    let mut worker = Process::spawn("worker", group.shimmer(&args), dir.path());
    let address = format!("127.0.0.1:{}", worker.listening_port(SOON));
    let core = bench::core(Arc::clone(&container), "w", 1.0);
    let answers: Vec<Payload> = std::thread::scope(|scope| {
        let coordinators: Vec<_> = (0..COORDINATORS)
            .map(|_| scope.spawn(|| coordinate(&container, &core, &address)))
            .collect();
        coordinators.into_iter().map(|coordinator| coordinator.join().unwrap()).collect()
    });
    assert_eq!(group.killed(), 0);
    assert!(worker.ended().is_none(), "{}", worker.log());
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    println!("{COORDINATORS} coordinators under {} MiB", limit / MIB);
    worker.signal("TERM");
    assert!(worker.wait_for_end(SOON).success(), "{}", worker.log());
}

/// The largest messages of a coordinator that keeps to what was announced are no larger than what is read.
#[test]
fn the_largest_requests_are_read() {
    let container = bench::container();
    let model = container.config();
    for max_rows in [1, 100, 512, limits::MAX_PART_ROWS] {
        let shape = MessageShape::of(model, max_rows);
        let row = model.hidden_size * size_of::<f32>();
        let rows = limits::part_rows(row, model.hidden_size, max_rows);
        let count = u32::try_from(rows).unwrap();
        let top_k = u32::try_from(model.gating.unwrap().top_k).unwrap();
        let (_, experts) = model.moe_layers().next().unwrap();
        let work = ExpertWork {
            row_count: count,
            rows: vec![1; rows * row].into(),
            experts: (0..experts).collect(),
            item_rows: vec![count; experts as usize],
            row_indices: (0..count * top_k).map(|pair| pair % count).collect(),
            gates: vec![0.5; (count * top_k) as usize],
            deadline_ms: u32::MAX,
            checksum: u64::MAX,
            ..ExpertWork::default()
        };
        let assign = bench::assign_all(u64::MAX, u64::MAX);
        for body in [Ask::Work(work), Ask::Assign(assign)] {
            let encoded = prost::Message::encoded_len(&SessionRequest { body: Some(body) });
            assert!(encoded <= shape.request, "{encoded} bytes, {shape:?}");
        }
        assert!(shape.bytes() >= 2 * shape.request + 2 * shape.answer);
    }
}

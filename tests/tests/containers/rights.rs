//! The image under the limits that platforms set.

use serde_json::Value;
use shimmer_tests::{
    engine::{Engine, docker},
    process::generate_args,
};

use super::{Bench, engine};

/// Output of `shimmer ARGS` in a container with these flags, the model where the image wants it, and no network.
fn run(engine: &Engine, bench: &Bench, flags: &[&str], args: &[&str]) -> Result<String, String> {
    let volume = format!("{}:/var/lib/shimmer/model:ro", bench.container().display());
    let first = ["run", "--rm", "--network", "none", "--volume", &volume];
    let image = engine.image("runtime");
    docker(&[&first, flags, &[image.as_str()], args].concat())
}

/// What a short generation gives that must be the same everywhere.
fn answer(json: &str) -> Value {
    let line = json.lines().last().unwrap();
    let answer: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {json}"));
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 6, "{answer}");
    assert_eq!(answer["logits_sha256"].as_str().unwrap().len(), 64, "{answer}");
    serde_json::json!([answer["tokens"], answer["text"], answer["logits_sha256"]])
}

#[test]
fn the_image_runs_as_anybody_without_rights_home_or_a_writable_root() {
    let Some(engine) = engine() else { return };
    let bench = Bench::new();
    let args = generate_args(std::path::Path::new("/var/lib/shimmer/model"), &[]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let own = generate_args(&bench.container(), &[]);
    let own =
        std::process::Command::new(shimmer_tests::process::shimmer_binary()).args(own).output();
    let expected = answer(&String::from_utf8(own.unwrap().stdout).unwrap());

    let anybody = format!("{}:{}", 10_000 + std::process::id() % 50_000, 4242);
    let confined = [
        "--user",
        &anybody,
        "--read-only",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--memory",
        "256m",
        "--env",
        "HOME=/nonexistent",
    ];
    let limits: [(&str, &[&str]); 5] = [
        ("anybody", &[]),
        ("one processor and one memory node", &["--cpuset-cpus", "0", "--cpuset-mems", "0"]),
        ("no locked memory", &["--ulimit", "memlock=65536:65536", "--env", "SHIMMER_MLOCK=on"]),
        ("all nodes asked for", &["--cpuset-mems", "0", "--env", "SHIMMER_NUMA=auto"]),
        ("few files", &["--ulimit", "nofile=64:64", "--pids-limit", "64"]),
    ];
    for (what, flags) in limits {
        let output = run(&engine, &bench, &[&confined, flags].concat(), &args);
        let output = output.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(answer(&output), expected, "{what}");
    }
}

/// Memory that a plan may divide, and what limits it.
fn available(plan: &str) -> (u64, String) {
    let plan: Value = serde_json::from_str(plan.lines().last().unwrap()).unwrap();
    let process = &plan["processes"][0];
    let limit = process["limit"].as_str().unwrap().to_owned();
    (process["available_bytes"].as_u64().unwrap(), limit)
}

const MIB: u64 = 1 << 20;

#[test]
fn a_budget_comes_from_the_limit_of_the_container() {
    let Some(engine) = engine() else { return };
    let bench = Bench::new();
    let plan = |mib: u64, args: &[&str]| {
        let memory = format!("{mib}m");
        let flags = ["--memory", &memory, "--memory-swap", &memory];
        run(&engine, &bench, &flags, &[&["plan", "--json"][..], args].concat())
    };
    let (small, limit) = available(&plan(192, &[]).unwrap());
    let (large, _) = available(&plan(384, &[]).unwrap());
    // This host has more than both; a little is what the process itself takes.
    assert!(small <= 192 * MIB && small > 128 * MIB, "{small}");
    assert!((large - small).abs_diff(192 * MIB) < 16 * MIB, "{small} {large}");
    assert!(limit.contains("control group") || limit.contains("cgroup"), "{limit}");
    // A size above the limit is refused before the kernel has to.
    let refused = plan(192, &["--ram", "1GiB"]).unwrap_err();
    assert!(refused.starts_with("exit status: 2"), "{refused}");
}

#[test]
fn page_cache_of_the_container_is_not_used_memory() {
    let Some(engine) = engine() else { return };
    let bench = Bench::new();
    let volume = format!("{}:/var/lib/shimmer/model:ro", bench.container().display());
    let image = engine.image("debug");
    let plan = |before: &str| {
        let script = format!("{before} shimmer plan --json");
        let first =
            ["run", "--rm", "--network", "none", "--memory", "256m", "--memory-swap", "256m"];
        let more = ["--volume", &volume, "--entrypoint", "sh", &image, "-c", &script];
        available(&docker(&[&first[..], &more].concat()).unwrap()).0
    };
    let (clean, cached) =
        (plan(""), plan("dd if=/dev/zero of=/var/tmp/cached bs=1M count=128 status=none;"));
    assert!(clean.abs_diff(cached) < 16 * MIB, "{clean} without, {cached} with 128 MiB of cache");
}

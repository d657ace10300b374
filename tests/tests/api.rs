//! The public API over real sockets, with workers that are slowed down so that a test can act in the middle of a step.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use shimmer_cli::{
    config::{ByteSize, InProcess},
    local::LocalCluster,
};
use shimmer_coordinator::{
    api::{ServerOptions, serve},
    dispatch::{ExpertTransport, TransportError, Wrapped, Wrapper},
    engine::EngineConfig,
};
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::{
    expert::v1::ExpertWork,
    status,
    v1::{
        CancelRequest, Chat, ChatMessage, DetokenizeRequest, FinishReason, GenerateRequest,
        SamplingParams, StopParams, TokenizeRequest, generate_request::Input,
        generate_response::Event, tokenize_request,
    },
};
use shimmer_tests::{
    client::{self, Client, greedy},
    cluster::{Cluster, ClusterOptions},
    models::TinyModel,
    wait::{wait_for, wait_until},
};
use shimmer_worker::TierOptions;
use tokio::{net::TcpListener, runtime::Runtime, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

const DEADLINE: Duration = Duration::from_secs(30);

/// Takes its time for every message and counts them.
#[derive(Debug)]
struct Slow {
    delay: Duration,
    sent: Arc<AtomicU64>,
}

impl Wrapper for Slow {
    fn send(
        &mut self,
        inner: &mut dyn ExpertTransport,
        worker: usize,
        work: ExpertWork,
    ) -> Result<(), TransportError> {
        std::thread::sleep(self.delay);
        self.sent.fetch_add(1, Ordering::SeqCst);
        inner.send(worker, work)
    }
}

/// A coordinator with one slow in-process worker behind a real socket. The model has two layers of experts, so a step
/// sends two messages.
struct Server {
    runtime: Runtime,
    port: u16,
    sent: Arc<AtomicU64>,
    shutdown: CancellationToken,
    served: Option<JoinHandle<()>>,
    _model: TinyModel,
}

impl Server {
    fn start(delay_ms: u64, limits: EngineConfig) -> Self {
        let model = TinyModel::new(Preset::Glm4Moe);
        let options = InProcess {
            container: model.container(NumericClass::default()),
            worker_weights: vec![1.0],
            threads: 1,
            isa: None,
            context: None,
            kv_budget: ByteSize(1 << 26),
            prefill_chunk: 4,
            tiers: TierOptions::default(),
        };
        let sent = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&sent);
        let delay = Duration::from_millis(delay_ms);
        let cluster = LocalCluster::start_with(&options, limits, |inner| {
            Box::new(Wrapped::new(inner, Slow { delay, sent: counter }))
        })
        .unwrap();
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shutdown = CancellationToken::new();
        let token = shutdown.clone();
        let options = ServerOptions { drain: Duration::from_secs(2), ..ServerOptions::default() };
        let served = runtime.spawn(async move {
            serve(cluster.inference().clone(), listener, token, options).await.unwrap();
        });
        Self { runtime, port, sent, shutdown, served: Some(served), _model: model }
    }

    fn connect(&self) -> Client {
        self.runtime.block_on(client::connect(self.port)).unwrap()
    }

    fn begin(
        &self,
        client: &Client,
        id: &str,
        prompt: &[u32],
    ) -> Result<Streaming<shimmer_proto::v1::GenerateResponse>, Status> {
        let request = GenerateRequest { request_id: Some(id.to_owned()), ..greedy(prompt, 400) };
        let mut client = client.clone();
        self.runtime.block_on(async move { Ok(client.generate(request).await?.into_inner()) })
    }

    fn cancel(&self, id: &str) -> bool {
        let mut client = self.connect();
        let request = CancelRequest { request_id: id.to_owned() };
        self.runtime.block_on(client.cancel(request)).unwrap().into_inner().cancelled
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }

    /// Messages that still go out after the client has gone: of the step that runs, and of one that may begin before
    /// the news arrives.
    fn check_stops(&self, at: u64) {
        const SETTLED: Duration = Duration::from_millis(400);
        let mut last = (self.sent(), Instant::now());
        wait_until("the step loop to rest", DEADLINE, || {
            let sent = self.sent();
            if sent != last.0 {
                last = (sent, Instant::now());
            }
            last.1.elapsed() > SETTLED
        });
        assert!(self.sent() - at <= 4, "{} messages after the client had gone", self.sent() - at);
    }
}

/// Moves a stream to its first event of the wanted kind.
fn advance(
    server: &Server,
    stream: &mut Streaming<shimmer_proto::v1::GenerateResponse>,
    wanted: fn(&Event) -> bool,
) {
    server.runtime.block_on(async {
        while let Some(response) = stream.message().await.unwrap() {
            if wanted(&response.event.unwrap()) {
                return;
            }
        }
        panic!("the stream ended early");
    });
}

#[test]
fn a_client_that_goes_stops_its_generation_within_a_step() {
    let server = Server::start(30, EngineConfig::default());
    // While it decodes: the stream is dropped, the connection stays.
    let client = server.connect();
    let mut stream = server.begin(&client, "decoding", &[1, 2, 3]).unwrap();
    advance(&server, &mut stream, |event| matches!(event, Event::Delta(_)));
    drop(stream);
    server.check_stops(server.sent());
    // While it prefills, 75 steps long: the whole connection goes.
    let client = server.connect();
    let mut stream = server.begin(&client, "prefilling", &[5; 300]).unwrap();
    advance(&server, &mut stream, |event| matches!(event, Event::Started(_)));
    drop((stream, client));
    server.check_stops(server.sent());
    // Both names are free again, and the server serves.
    let client = server.connect();
    for id in ["decoding", "prefilling"] {
        drop(server.begin(&client, id, &[1]).unwrap());
    }
}

#[test]
fn cancel_ends_the_stream_and_names_are_unique_while_they_run() {
    let server = Server::start(20, EngineConfig::default());
    let client = server.connect();
    let mut stream = server.begin(&client, "a", &[1, 2, 3]).unwrap();
    advance(&server, &mut stream, |event| matches!(event, Event::Started(_)));
    assert_eq!(server.begin(&client, "a", &[1]).unwrap_err().code(), Code::AlreadyExists);
    assert!(server.cancel("a"));
    advance(&server, &mut stream, |event| match event {
        Event::Finished(finished) => finished.reason() == FinishReason::Cancelled,
        _ => false,
    });
    wait_until("the name to be free", DEADLINE, || !server.cancel("a"));
    assert!(!server.cancel("never"));
}

#[test]
fn a_full_queue_is_refused_with_a_time_to_come_back() {
    let limits = EngineConfig { max_running: 1, max_waiting: 1, ..EngineConfig::default() };
    let server = Server::start(20, limits);
    let client = server.connect();
    let mut running = server.begin(&client, "running", &[1]).unwrap();
    advance(&server, &mut running, |event| matches!(event, Event::Started(_)));
    let _waiting = server.begin(&client, "waiting", &[1]).unwrap();
    let refused = server.begin(&client, "too many", &[1]).unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(status::reason(&refused).as_deref(), Some("QUEUE_FULL"));
    assert!(status::retry_after(&refused).is_some());
}

#[test]
fn shutdown_ends_what_does_not_finish_in_time() {
    let mut server = Server::start(20, EngineConfig::default());
    let client = server.connect();
    let mut stream = server.begin(&client, "long", &[1]).unwrap();
    advance(&server, &mut stream, |event| matches!(event, Event::Started(_)));
    server.shutdown.cancel();
    let error = server.runtime.block_on(async {
        loop {
            if let Err(error) = stream.message().await {
                return error;
            }
        }
    });
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    let served = server.served.take().unwrap();
    server
        .runtime
        .block_on(async { tokio::time::timeout(DEADLINE, served).await.unwrap().unwrap() });
}

#[test]
fn shutdown_lets_short_answers_finish() {
    let mut server = Server::start(5, EngineConfig::default());
    let client = server.connect();
    let request = greedy(&[1], 8);
    let mut stream = {
        let mut client = client.clone();
        server.runtime.block_on(client.generate(request)).unwrap().into_inner()
    };
    advance(&server, &mut stream, |event| matches!(event, Event::Started(_)));
    server.shutdown.cancel();
    advance(&server, &mut stream, |event| matches!(event, Event::Finished(_)));
    drop((stream, client));
    let served = server.served.take().unwrap();
    server
        .runtime
        .block_on(async { tokio::time::timeout(DEADLINE, served).await.unwrap().unwrap() });
}

/// What is refused, and the field that the refusal names.
fn check_refused(
    server: &Server,
    change: impl FnOnce(&mut GenerateRequest),
    code: Code,
    field: &str,
) {
    let mut request = greedy(&[1, 2, 3], 4);
    change(&mut request);
    let mut client = server.connect();
    let error = server.runtime.block_on(client.generate(request)).unwrap_err();
    let fields: Vec<String> =
        status::violations(&error).into_iter().map(|(field, _)| field).collect();
    assert_eq!(
        (error.code(), fields.first().map_or("", String::as_str)),
        (code, field),
        "{error:?}"
    );
}

#[test]
fn refusals_name_their_field() {
    let server = Server::start(0, EngineConfig::default());
    let invalid = |change: fn(&mut GenerateRequest), field| {
        check_refused(&server, change, Code::InvalidArgument, field)
    };
    invalid(|r| r.input = None, "input");
    invalid(|r| r.input = Some(Input::Text(String::new())), "input");
    invalid(|r| r.request_id = Some(String::new()), "request_id");
    invalid(|r| set_sampling(r, |s| s.top_p = Some(0.0)), "sampling.top_p");
    invalid(|r| set_sampling(r, |s| s.temperature = Some(f32::NAN)), "sampling.temperature");
    invalid(
        |r| set_sampling(r, |s| s.repetition_penalty = Some(0.0)),
        "sampling.repetition_penalty",
    );
    invalid(
        |r| set_sampling(r, |s| s.logit_bias.extend([(99_999, 1.0)])),
        "sampling.logit_bias[99999]",
    );
    invalid(|r| set_stop(r, |s| s.max_tokens = Some(0)), "stop.max_tokens");
    invalid(|r| set_stop(r, |s| s.stop_strings = vec![String::new()]), "stop.stop_strings[0]");
    invalid(|r| r.output.as_mut().unwrap().logprobs = Some(21), "output.logprobs");
    invalid(|r| r.input = token_ids(&[1, 99_999]), "token_ids.ids[1]");
    invalid(|r| r.input = token_ids(&[]), "input");
    // The whole context and more; one token less fits, and asks for more than is left are lowered.
    let context = server.runtime.block_on(async {
        let mut client = client::connect(server.port).await.unwrap();
        let model =
            client.get_model(shimmer_proto::v1::GetModelRequest {}).await.unwrap().into_inner();
        usize::try_from(model.context_length).unwrap()
    });
    let mut too_long = greedy(&vec![1; context], 1000);
    let mut client = server.connect();
    let error = server.runtime.block_on(client.generate(too_long.clone())).unwrap_err();
    for part in [context.to_string().as_str(), "1000"] {
        assert!(error.message().contains(part), "{error:?}");
    }
    too_long.input = token_ids(&vec![1; context - 1]);
    let generation = server.runtime.block_on(client::generate(&mut client, too_long)).unwrap();
    assert_eq!((generation.started.max_tokens, generation.reason), (1, FinishReason::Length));
}

fn set_sampling(request: &mut GenerateRequest, change: impl FnOnce(&mut SamplingParams)) {
    change(request.sampling.as_mut().unwrap());
}

fn set_stop(request: &mut GenerateRequest, change: impl FnOnce(&mut StopParams)) {
    change(request.stop.as_mut().unwrap());
}

fn token_ids(ids: &[u32]) -> Option<Input> {
    Some(Input::TokenIds(shimmer_proto::v1::TokenIds { ids: ids.to_vec() }))
}

#[test]
fn text_goes_to_ids_and_back() {
    let server = Server::start(0, EngineConfig::default());
    let mut client = server.connect();
    server.runtime.block_on(async {
        let text = "żółw 你好 🙂".to_owned();
        let request = TokenizeRequest {
            input: Some(tokenize_request::Input::Text(text.clone())),
            add_special_tokens: Some(false),
            ..TokenizeRequest::default()
        };
        let ids = client.tokenize(request).await.unwrap().into_inner().token_ids;
        let request = DetokenizeRequest { token_ids: ids, ..DetokenizeRequest::default() };
        assert_eq!(client.detokenize(request).await.unwrap().into_inner().text, text);
        let message = ChatMessage { role: "user".to_owned(), content: "Hi".to_owned() };
        let chat = Chat { messages: vec![message], add_generation_prompt: None };
        let request = TokenizeRequest {
            input: Some(tokenize_request::Input::Chat(chat)),
            ..TokenizeRequest::default()
        };
        let answer = client.tokenize(request).await.unwrap().into_inner();
        assert!(answer.rendered.unwrap().contains("Hi") && !answer.token_ids.is_empty());
        let unknown = DetokenizeRequest { token_ids: vec![99_999], ..DetokenizeRequest::default() };
        assert_eq!(client.detokenize(unknown).await.unwrap_err().code(), Code::InvalidArgument);
    });
}

#[test]
fn health_follows_the_workers() {
    let model = TinyModel::new(Preset::Olmoe);
    let mut cluster =
        Cluster::start(&ClusterOptions::new(&model.container(NumericClass::default()), 2));
    let serving = |cluster: &Cluster| {
        cluster.block_on(async {
            let endpoint = tonic::transport::Endpoint::from_shared(format!(
                "http://127.0.0.1:{}",
                cluster.port
            ))
            .unwrap();
            let mut health = HealthClient::new(endpoint.connect().await.ok()?);
            let request = HealthCheckRequest { service: "shimmer.v1.InferenceService".to_owned() };
            Some(health.check(request).await.ok()?.into_inner().status == 1)
        })
    };
    wait_until("health to be good", DEADLINE, || serving(&cluster) == Some(true));
    // One that is left can stand in for all.
    cluster.workers.iter_mut().for_each(|worker| worker.process.kill());
    wait_until("health to be bad", DEADLINE, || serving(&cluster) == Some(false));
    let error = cluster.generate(greedy(&[1, 2, 3], 4)).unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    assert!(status::retry_after(&error).is_some());
    cluster.restart_worker(0);
    cluster.restart_worker(1);
    wait_for("health to be good again", DEADLINE, || serving(&cluster).filter(|serving| *serving));
    cluster.generate(greedy(&[1, 2, 3], 4)).unwrap();
}

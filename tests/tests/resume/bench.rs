//! Coordinators over the same workers, with one journal.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_proto::v1::{
    GenerateRequest, GenerateResponse, GetModelRequest, OutputParams, ResumeRequest,
    SamplingParams, StopParams, Timings, TokenIds, generate_request::Input,
    generate_response::Event,
};
use shimmer_tests::{
    client::{self, Client},
    cluster::{Cluster, ClusterOptions},
    models::TinyModel,
    process::Process,
    wait::wait_for,
};
use tempfile::TempDir;
use tonic::{Status, Streaming};

pub(super) const DEADLINE: Duration = Duration::from_secs(60);

/// A cluster whose coordinator keeps a journal.
pub(super) struct Bench {
    pub(super) cluster: Cluster,
    pub(super) journal: PathBuf,
    pub(super) container: PathBuf,
    started: usize,
    _directory: TempDir,
    _model: TinyModel,
}

/// One more coordinator.
pub(super) struct Coordinator {
    pub(super) process: Process,
    pub(super) port: u16,
}

impl Bench {
    pub(super) fn new() -> Self {
        let model = TinyModel::new(Preset::Glm4Moe);
        let container = model.container(NumericClass::default());
        let directory = TempDir::new().unwrap();
        let journal = directory.path().join("deep").join("journal");
        let args = ["--journal".to_owned(), journal.display().to_string()].to_vec();
        let cluster =
            Cluster::start(&ClusterOptions { args, ..ClusterOptions::new(&container, 2) });
        Self { cluster, journal, container, started: 0, _directory: directory, _model: model }
    }

    /// Starts one more coordinator with the same journal and waits until it serves.
    pub(super) fn another(&mut self, more: &[&str]) -> Coordinator {
        let journal = self.journal.display().to_string();
        let args = [&["--journal", journal.as_str()][..], more].concat();
        self.with_args(&args)
    }

    /// Starts one more coordinator and waits until it serves.
    pub(super) fn with_args(&mut self, more: &[&str]) -> Coordinator {
        self.started += 1;
        let args = self.cluster.coordinator_args(&self.container, more);
        let name = format!("coordinator-{}", self.started);
        let process =
            Process::shimmer(&name, &args, [("RUST_BACKTRACE", "1")], self.cluster.directory());
        let mut coordinator = Coordinator { process, port: 0 };
        coordinator.port = coordinator.process.listening_port(DEADLINE);
        wait_for(&format!("{name} to serve"), DEADLINE, || self.serves(coordinator.port));
        coordinator
    }

    /// All workers serve a coordinator.
    pub(super) fn serves(&self, port: u16) -> Option<()> {
        self.cluster.block_on(async {
            let mut client = client::connect(port).await.ok()?;
            let model = client.get_model(GetModelRequest {}).await.ok()?.into_inner();
            model.workers.iter().all(|worker| worker.state == "serving").then_some(())
        })
    }

    pub(super) fn connect(&self, port: u16) -> Client {
        self.cluster.block_on(client::connect(port)).unwrap()
    }

    /// Begins a request and reads its first `count` events.
    pub(super) fn begin(
        &self,
        port: u16,
        request: GenerateRequest,
        count: usize,
    ) -> (Streaming<GenerateResponse>, Vec<GenerateResponse>) {
        let mut client = self.connect(port);
        self.cluster.block_on(async {
            let mut stream = client.generate(request).await.unwrap().into_inner();
            let mut events = Vec::new();
            while events.len() < count {
                events.push(stream.message().await.unwrap().expect("more events"));
            }
            (stream, events)
        })
    }

    /// Reads a stream to its end.
    pub(super) fn rest(
        &self,
        stream: &mut Streaming<GenerateResponse>,
    ) -> (Vec<GenerateResponse>, Option<Status>) {
        self.cluster.block_on(async {
            let mut events = Vec::new();
            loop {
                match stream.message().await {
                    Ok(Some(event)) => events.push(event),
                    Ok(None) => return (events, None),
                    Err(status) => return (events, Some(status)),
                }
            }
        })
    }

    /// All events of a request.
    pub(super) fn whole(&self, port: u16, request: GenerateRequest) -> Vec<GenerateResponse> {
        let (mut stream, mut events) = self.begin(port, request, 1);
        let (rest, status) = self.rest(&mut stream);
        assert!(status.is_none(), "{status:?}");
        events.extend(rest);
        plain(events)
    }

    pub(super) fn resume(
        &self,
        port: u16,
        id: &str,
        after_sequence: Option<u64>,
    ) -> Result<Streaming<GenerateResponse>, Status> {
        let request = ResumeRequest { request_id: id.to_owned(), after_sequence };
        let mut client = self.connect(port);
        self.cluster.block_on(async move { Ok(client.resume(request).await?.into_inner()) })
    }

    /// The rest of a request behind the events that the client has.
    pub(super) fn resumed(
        &self,
        port: u16,
        id: &str,
        known: &[GenerateResponse],
    ) -> Vec<GenerateResponse> {
        let after = known.last().map(|event| event.sequence);
        let mut stream = self.resume(port, id, after).unwrap();
        let (rest, status) = self.rest(&mut stream);
        assert!(status.is_none(), "{status:?}");
        plain([known, &rest].concat())
    }

    /// The only file of a request in the journal.
    pub(super) fn file(&self, id: &str) -> PathBuf {
        file(&self.journal, id)
    }
}

/// The file whose name begins with an id.
pub(super) fn file(journal: &Path, id: &str) -> PathBuf {
    let mut entries = std::fs::read_dir(journal).unwrap().map(|entry| entry.unwrap().path());
    let named =
        |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{id}-"));
    entries.find(named).unwrap_or_else(|| panic!("no file of {id}"))
}

/// Events without the times and the name, which differ from run to run.
pub(super) fn plain(mut events: Vec<GenerateResponse>) -> Vec<GenerateResponse> {
    for event in &mut events {
        match &mut event.event {
            Some(Event::Started(started)) => started.request_id = String::new(),
            Some(Event::Finished(finished)) => finished.timings = Some(Timings::default()),
            _ => {}
        }
    }
    events
}

/// A sampled request whose text is cut over tokens and held back for a stop string.
pub(super) fn request(id: &str, max_tokens: u32) -> GenerateRequest {
    let sampling = SamplingParams {
        temperature: Some(1.1),
        top_k: Some(60),
        repetition_penalty: Some(1.05),
        frequency_penalty: Some(0.1),
        seed: Some(77),
        ..SamplingParams::default()
    };
    GenerateRequest {
        request_id: Some(id.to_owned()),
        input: Some(Input::TokenIds(TokenIds { ids: (1..40).collect() })),
        sampling: Some(sampling),
        stop: Some(StopParams {
            max_tokens: Some(max_tokens),
            stop_strings: vec!["no such text".to_owned()],
            ignore_eos: Some(true),
            ..StopParams::default()
        }),
        output: None,
    }
}

/// The same with log-probabilities and a digest, which need the logits.
pub(super) fn with_logits(id: &str, max_tokens: u32) -> GenerateRequest {
    let output =
        OutputParams { logprobs: Some(2), logits_digest: Some(true), ..OutputParams::default() };
    GenerateRequest { output: Some(output), ..request(id, max_tokens) }
}

//! What this crate's tests share: tiny containers, workers inside the test, a client.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use shimmer_kernels::{
    ActivationFormat, ActivationRows, Expert, ExpertLayout, ExpertScratch, Isa, Kernels,
    WeightFormat,
};
use shimmer_model::tiny::{self, Preset, TinyOptions};
use shimmer_model::{Container, ConvertOptions, NumericClass, convert};
use shimmer_proto::expert::v1::expert_result::Payload;
use shimmer_proto::expert::v1::{
    ErrorCode, ExpertResult, ExpertWork, Fence, PrefetchHint, WorkerError,
};

use crate::dispatch::{
    ExpertTransport, Pace, PartLimits, Reply, Standing, TransportError, WorkerInfo,
};
use crate::engine::{
    Engine, EngineConfig, EngineHandle, EngineParts, Event, EventStream, Finished, GenerationError,
    PositionLogprobs,
};
use crate::placement::{Candidate, PlacedLayer, Placement};
use crate::tokenizer::Tokenizer;

/// A tiny container with its tokenizer.
#[derive(Debug)]
pub(crate) struct Tiny {
    pub(crate) container: Arc<Container>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    _directory: tempfile::TempDir,
}

/// A tiny container of a preset, made once per process.
pub(crate) fn tiny_model(preset: Preset, experts: WeightFormat, trunk: WeightFormat) -> Arc<Tiny> {
    static MADE: OnceLock<Mutex<BTreeMap<String, Arc<Tiny>>>> = OnceLock::new();
    let mut made = MADE.get_or_init(Mutex::default).lock().unwrap();
    let tiny = made.entry(format!("{preset:?} {experts} {trunk}"));
    Arc::clone(
        tiny.or_insert_with(|| Arc::new(make(preset, experts, trunk, &TinyOptions::default()))),
    )
}

/// A tiny container with changes to the checkpoint.
pub(crate) fn make(
    preset: Preset,
    experts: WeightFormat,
    trunk: WeightFormat,
    options: &TinyOptions,
) -> Tiny {
    let directory = tempfile::tempdir().unwrap();
    let (source, out) = (directory.path().join("checkpoint"), directory.path().join("container"));
    tiny::write_checkpoint(preset, options, &source).unwrap();
    let class = NumericClass { experts, ..NumericClass::uniform(trunk) };
    convert(&ConvertOptions { source, out: out.clone(), class, name: None }, &()).unwrap();
    let container = Arc::new(Container::open(&out).unwrap());
    let (json, config) =
        (container.tokenizer_json().unwrap().unwrap(), container.tokenizer_config().unwrap());
    let tokenizer = Arc::new(Tokenizer::from_bytes(&json, config.as_deref()).unwrap());
    Tiny { container, tokenizer, _directory: directory }
}

/// What a scripted worker does with one piece of work.
#[derive(Debug, PartialEq)]
pub(crate) enum Act {
    Answer,
    /// One f32 row per expert and row instead of sums.
    AnswerOutputs,
    /// Says nothing.
    Silence,
    /// An earlier reply's fence.
    Stale,
    /// The worker dies.
    Die,
    /// Answers something else.
    Lie,
    Refuse(ErrorCode, Vec<u32>),
}

type Script = Box<dyn FnMut(usize, &ExpertWork) -> Act + Send>;

/// Workers inside the test: the canonical expert over the container's slabs, computed when a reply is asked for.
pub(crate) struct TestWorkers {
    kernels: Kernels,
    infos: Vec<WorkerInfo>,
    placement: Placement,
    layouts: BTreeMap<u32, ExpertLayout>,
    slabs: BTreeMap<(u32, u32), Vec<u8>>,
    hidden: usize,
    format: ActivationFormat,
    queue: VecDeque<(usize, ExpertWork)>,
    lost: Vec<bool>,
    script: Script,
    limits: PartLimits,
    sent: Option<Sent>,
    began: Instant,
    /// Time passes when nothing arrives.
    passed: Duration,
    /// Copies of every expert besides the first, by the distance to its worker.
    copies: BTreeMap<(u32, u32), Vec<usize>>,
    stand_ins: bool,
    suspects: Vec<bool>,
    paces: Vec<Pace>,
    quarantined: Arc<Mutex<Vec<usize>>>,
    own: bool,
}

/// What went to the workers, in order, where a test wants to know.
pub(crate) type Sent = Arc<Mutex<Vec<(usize, Message)>>>;

/// See [`Sent`].
#[derive(Debug, Clone)]
pub(crate) enum Message {
    Work(Fence),
    Hint(PrefetchHint),
}

impl fmt::Debug for TestWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestWorkers").field("workers", &self.infos).finish_non_exhaustive()
    }
}

impl TestWorkers {
    pub(crate) fn new(tiny: &Tiny, kernels: Kernels, weights: &[f64]) -> Self {
        let container = &tiny.container;
        let (mut layouts, mut slabs, mut layers) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for (layer, experts) in container.config().moe_layers() {
            let layout = container.expert_layout(layer).unwrap();
            for expert in 0..experts {
                let mut slab = vec![0; layout.slab_bytes()];
                container.read_expert(layer, expert, &mut slab).unwrap();
                slabs.insert((layer, expert), slab);
            }
            layouts.insert(layer, layout);
            layers.push(PlacedLayer { layer, experts, slab_bytes: 1 });
        }
        let candidate = |(index, weight): (usize, &f64)| Candidate {
            id: format!("w{index}"),
            weight: *weight,
            ..Candidate::default()
        };
        let candidates: Vec<Candidate> = weights.iter().enumerate().map(candidate).collect();
        Self {
            kernels,
            infos: candidates.iter().map(|c| WorkerInfo { id: c.id.clone() }).collect(),
            placement: Placement::compute(&layers, &candidates).unwrap(),
            layouts,
            slabs,
            hidden: container.config().hidden_size,
            format: container.manifest().numeric_class.expert_activations(),
            queue: VecDeque::new(),
            lost: vec![false; weights.len()],
            script: Box::new(|_, _| Act::Answer),
            limits: PartLimits { max_rows: 4096, max_bytes: 4 << 20 },
            sent: None,
            began: Instant::now(),
            passed: Duration::ZERO,
            copies: BTreeMap::new(),
            stand_ins: false,
            suspects: vec![false; weights.len()],
            paces: vec![Pace::Usual; weights.len()],
            quarantined: Arc::default(),
            own: false,
        }
    }

    /// Every expert has this many copies, on the workers after its first.
    pub(crate) fn copied(mut self, copies: usize) -> Self {
        let workers = self.infos.len();
        for &(layer, expert) in self.slabs.keys() {
            let first = self.placement.owner(layer, expert).unwrap();
            let held = (0..copies.min(workers)).map(|next| (first + next) % workers).collect();
            self.copies.insert((layer, expert), held);
        }
        self
    }

    /// Every worker can read what it does not hold.
    pub(crate) fn standing_in(mut self) -> Self {
        self.stand_ins = true;
        self
    }

    /// The coordinator has a copy of all experts.
    pub(crate) fn with_own_copy(mut self) -> Self {
        self.own = true;
        self
    }

    /// A worker has become slow.
    pub(crate) fn slowed(mut self, worker: usize, pace: Pace) -> Self {
        self.paces[worker] = pace;
        self
    }

    /// Who was taken out of service.
    pub(crate) fn quarantined(&self) -> Arc<Mutex<Vec<usize>>> {
        Arc::clone(&self.quarantined)
    }

    /// Workers that want hints.
    pub(crate) fn hinted(mut self, sent: &Sent) -> Self {
        self.sent = Some(Arc::clone(sent));
        self
    }

    pub(crate) fn script(
        mut self,
        script: impl FnMut(usize, &ExpertWork) -> Act + Send + 'static,
    ) -> Self {
        self.script = Box::new(script);
        self
    }

    pub(crate) fn limits(mut self, max_rows: usize, max_bytes: usize) -> Self {
        self.limits = PartLimits { max_rows, max_bytes };
        self
    }

    /// Everything that was sent and not yet asked for.
    pub(crate) fn take_sent(&mut self) -> Vec<(usize, ExpertWork)> {
        self.queue.drain(..).collect()
    }

    /// A worker's answer with one bit of it changed.
    pub(crate) fn lie(&self, work: &ExpertWork) -> ExpertResult {
        let mut result = self.answer(work, false);
        if let Some(Payload::Accumulators(bytes)) = &mut result.payload {
            let mut changed = bytes.to_vec();
            changed[0] ^= 1;
            *bytes = changed.into();
        }
        result
    }

    /// A worker goes for good.
    pub(crate) fn lose(&mut self, worker: usize) {
        self.lost[worker] = true;
    }

    /// A worker has answered something.
    pub(crate) fn unsuspect(&mut self, worker: usize) {
        self.suspects[worker] = false;
    }

    /// Time passes.
    pub(crate) fn pass(&mut self, time: Duration) {
        self.passed += time;
    }

    /// Applies every expert of the work: the sums and the single outputs.
    fn compute(&self, work: &ExpertWork) -> (Vec<i64>, Vec<f32>) {
        let mut rows = ActivationRows::new();
        rows.read_wire(self.format, work.row_count as usize, self.hidden, &work.rows).unwrap();
        let layer = work.fence.unwrap().layer;
        let mut sums = vec![0; work.row_count as usize * self.hidden];
        let mut outputs = Vec::new();
        let (mut begin, mut scratch) = (0, ExpertScratch::default());
        for (expert, count) in work.experts.iter().zip(&work.item_rows) {
            let range = begin..begin + *count as usize;
            begin = range.end;
            let picked = &work.row_indices[range.clone()];
            let mut out = vec![0.0; picked.len() * self.hidden];
            let view =
                Expert::from_slab(&self.layouts[&layer], &self.slabs[&(layer, *expert)]).unwrap();
            self.kernels.expert(&view, &rows, picked, &mut out, &mut scratch);
            for ((row, gate), y) in
                picked.iter().zip(&work.gates[range]).zip(out.chunks_exact(self.hidden))
            {
                let sums = &mut sums[*row as usize * self.hidden..][..self.hidden];
                self.kernels.accumulate(sums, *gate, y).unwrap();
            }
            outputs.extend(out);
        }
        (sums, outputs)
    }

    /// A worker's answer, in either form.
    pub(crate) fn answer(&self, work: &ExpertWork, outputs: bool) -> ExpertResult {
        let (sums, single) = self.compute(work);
        let payload = if outputs {
            Payload::Outputs(
                single.iter().flat_map(|y| y.to_le_bytes()).collect::<Vec<u8>>().into(),
            )
        } else {
            Payload::Accumulators(
                sums.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<u8>>().into(),
            )
        };
        ExpertResult {
            fence: work.fence,
            row_count: work.row_count,
            payload: Some(payload),
            compute_us: 1,
            ..ExpertResult::default()
        }
    }
}

impl ExpertTransport for TestWorkers {
    fn workers(&self) -> &[WorkerInfo] {
        &self.infos
    }

    fn now(&self) -> Instant {
        self.began + self.passed
    }

    fn copies(&self, layer: u32, expert: u32) -> &[usize] {
        let copied = self.copies.get(&(layer, expert));
        copied.map_or_else(|| self.placement.copies(layer, expert), Vec::as_slice)
    }

    fn standing(&self, worker: usize) -> Standing {
        match (self.lost[worker], self.suspects[worker]) {
            (true, _) => Standing::Away,
            (false, true) => Standing::Suspect,
            (false, false) => Standing::Serving,
        }
    }

    fn stand_ins(&self, _layer: u32) -> Vec<usize> {
        (0..self.infos.len()).filter(|_| self.stand_ins).collect()
    }

    fn adopt(
        &mut self,
        _worker: usize,
        _layer: u32,
        experts: &[u32],
    ) -> Result<usize, TransportError> {
        assert!(experts.is_sorted_by(|a, b| a < b) && !experts.is_empty());
        Ok(experts.len())
    }

    fn pace(&self, worker: usize) -> Pace {
        self.paces[worker]
    }

    fn suspect(&mut self, worker: usize) {
        self.suspects[worker] = true;
    }

    fn quarantine(&mut self, worker: usize, _reason: &str) {
        self.lost[worker] = true;
        self.quarantined.lock().unwrap().push(worker);
    }

    fn is_quarantined(&self, worker: usize) -> bool {
        self.quarantined.lock().unwrap().contains(&worker)
    }

    fn own_copy(&mut self, work: &ExpertWork) -> Option<Result<ExpertResult, WorkerError>> {
        self.own.then(|| Ok(self.answer(work, false)))
    }

    fn has_own_copy(&self, _layer: u32) -> bool {
        self.own
    }

    fn fence_base(&self) -> (u64, u64) {
        (1, 1)
    }

    fn limits(&self, _worker: usize) -> PartLimits {
        self.limits
    }

    fn send(&mut self, worker: usize, work: ExpertWork) -> Result<(), TransportError> {
        assert!(
            work.row_count as usize <= self.limits.max_rows
                && work.rows.len() <= self.limits.max_bytes
        );
        if let Some(sent) = &self.sent {
            sent.lock().unwrap().push((worker, Message::Work(work.fence.unwrap())));
        }
        self.queue.push_back((worker, work));
        Ok(())
    }

    fn wants_hints(&self, _worker: usize) -> bool {
        self.sent.is_some()
    }

    fn hint(&mut self, worker: usize, hint: PrefetchHint) {
        let sent = self.sent.as_ref().expect("hints go to who wants them");
        sent.lock().unwrap().push((worker, Message::Hint(hint)));
    }

    fn receive(&mut self, deadline: Instant) -> Result<Reply, TransportError> {
        // Last in, first out: replies come in an order of their own.
        let Some((worker, work)) = self.queue.pop_back() else {
            self.passed = self.passed.max(deadline.saturating_duration_since(self.began));
            return Err(TransportError::Timeout);
        };
        let act = (self.script)(worker, &work);
        let outcome = match act {
            Act::Answer | Act::AnswerOutputs => Ok(self.answer(&work, act == Act::AnswerOutputs)),
            Act::Silence => return self.receive(deadline),
            Act::Lie => Ok(self.lie(&work)),
            Act::Stale => {
                let mut result = self.answer(&work, false);
                if let Some(fence) = &mut result.fence {
                    fence.step -= 1;
                }
                self.queue.push_front((worker, work));
                Ok(result)
            }
            Act::Die => {
                self.lost[worker] = true;
                self.queue.retain(|(other, _)| *other != worker);
                return Err(TransportError::Lost {
                    worker,
                    detail: "killed by the test".to_owned(),
                });
            }
            Act::Refuse(code, rows) => {
                let detail = format!("{code:?} by the test");
                Err(WorkerError {
                    code: code.into(),
                    detail,
                    fence: work.fence,
                    rows,
                    ..WorkerError::default()
                })
            }
        };
        Ok(Reply { worker, outcome })
    }

    fn give_up(&mut self, worker: usize, _reason: &str) {
        self.lost[worker] = true;
    }
}

/// Limits under which a test engine runs.
pub(crate) fn config(max_batch_rows: usize, prefill_chunk: usize, threads: usize) -> EngineConfig {
    EngineConfig {
        threads,
        max_batch_rows,
        prefill_chunk,
        max_running: max_batch_rows.min(16),
        kv_budget_bytes: 64 << 20,
        layer_deadline: Duration::from_secs(60),
        ..EngineConfig::default()
    }
}

/// Starts an engine over workers of the test.
pub(crate) fn start(tiny: &Tiny, workers: TestWorkers, config: EngineConfig) -> EngineHandle {
    let parts = EngineParts {
        container: Arc::clone(&tiny.container),
        kernels: workers.kernels,
        tokenizer: Arc::clone(&tiny.tokenizer),
        transport: Box::new(workers),
        config,
        thread_start: None,
    };
    Engine::start(parts).unwrap()
}

/// Kernels of an instruction set, or none on a processor that lacks it.
pub(crate) fn kernels(isa: Isa) -> Option<Kernels> {
    Kernels::new(Some(isa)).ok()
}

/// Everything that a client saw.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    pub(crate) logprobs: Vec<PositionLogprobs>,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) finished: Option<Finished>,
    pub(crate) failed: Option<GenerationError>,
}

impl Outcome {
    /// The digest over all logits and tokens.
    pub(crate) fn sha256(&self) -> &str {
        self.finished
            .as_ref()
            .and_then(|finished| finished.logits_sha256.as_deref())
            .unwrap_or_else(|| panic!("{self:?}"))
    }
}

/// Reads a stream to its end.
pub(crate) fn collect(mut stream: EventStream) -> Outcome {
    let mut outcome = Outcome::default();
    while let Some(event) = stream.blocking_recv() {
        assert!(outcome.finished.is_none() && outcome.failed.is_none(), "{event:?} after the end");
        match event {
            Event::Started { max_tokens, .. } => {
                assert!(outcome.max_tokens.replace(max_tokens).is_none(), "one start");
            }
            Event::Delta { text, token_ids, logprobs } => {
                assert!(outcome.max_tokens.is_some(), "a start first");
                outcome.text.push_str(&text);
                outcome.tokens.extend(token_ids);
                outcome.logprobs.extend(logprobs);
            }
            Event::Finished(finished) => outcome.finished = Some(finished),
            Event::Failed(error) => outcome.failed = Some(error),
        }
    }
    outcome
}

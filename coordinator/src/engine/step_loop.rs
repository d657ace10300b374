//! The step thread: takes commands between steps, plans a step, runs it, samples, sends events. It is a thread of the
//! trunk's pool; while it waits for a command or a worker, the pool has nothing else to do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use rayon::prelude::*;
use shimmer_kernels::AttentionSpan;

use super::active::Active;
use super::events::{Event, FinishReason, GenerationError};
use super::handle::{Accepted, Command};
use super::job::{Job, fail};
use super::stats::{EngineStats, Published};
use crate::dispatch::ExpertTransport;
use crate::gating::RowFault;
use crate::kv_cache::KvCache;
use crate::sampler::{SamplerError, check_finite};
use crate::scheduler::{Scheduler, SequenceId, Span};
use crate::sequence::{Divergence, Ended, Known, Sampled, Sequence};
use crate::tokenizer::Tokenizer;
use crate::trace::{self, TracedStep};
use crate::trunk::{StepRows, Trunk};

/// How often an idle step thread looks whether the workers have changed. The look costs a few loads.
const IDLE_LOOK: Duration = Duration::from_millis(100);

/// What the step thread owns.
#[derive(Debug)]
pub(super) struct StepLoop<'w> {
    pub(super) trunk: Trunk<'w>,
    pub(super) cache: KvCache,
    pub(super) scheduler: Scheduler,
    pub(super) transport: Box<dyn ExpertTransport>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) end_tokens: Arc<[u32]>,
    /// Routed experts of each layer that has some.
    pub(super) moe_layers: Vec<(u32, u32)>,
    pub(super) vocab_size: usize,
    pub(super) max_logit_rows: usize,
    pub(super) jobs: BTreeMap<SequenceId, Job>,
    pub(super) next_id: u64,
    pub(super) step: u64,
    /// Generations that are traced; a step looks no further while there is none.
    pub(super) traced: usize,
    pub(super) buffers: StepBuffers,
    pub(super) stats: EngineStats,
    pub(super) published: Published,
}

/// Lists of one step, reused.
#[derive(Debug, Default)]
pub(super) struct StepBuffers {
    spans: Vec<Span>,
    tokens: Vec<u32>,
    /// Row and owner of every row of logits that is wanted.
    wanted: Vec<(usize, SequenceId)>,
}

impl StepLoop<'_> {
    /// Runs until it is told to stop or every handle is gone.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        while self.take_commands(commands) {
            self.between_steps();
            self.drop_lost_clients();
            while let Some(id) = self.scheduler.admit() {
                self.start(id);
            }
            self.step();
            self.publish();
        }
        while let Some(&id) = self.jobs.keys().next() {
            if let Some(job) = self.remove(id) {
                self.fail_job(job, GenerationError::ShuttingDown);
            }
        }
    }

    /// Lets a placement come into force and new workers take their places.
    fn between_steps(&mut self) {
        self.transport.between_steps();
        for worker in self.transport.take_reseated() {
            self.trunk.forget_worker(worker);
        }
    }

    /// Waits for a command while there is nothing to do; false at the end.
    fn take_commands(&mut self, commands: &Receiver<Command>) -> bool {
        if self.scheduler.is_idle() {
            self.transport.running(false);
        }
        while self.scheduler.is_idle() {
            match commands.recv_timeout(IDLE_LOOK) {
                Ok(command) => {
                    // Before it is looked who could compute it.
                    self.transport.running(true);
                    if !self.apply(command) {
                        return false;
                    }
                    break;
                }
                // A placement that is ready comes into force without traffic too.
                Err(RecvTimeoutError::Timeout) => self.between_steps(),
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match commands.try_recv() {
                Ok(command) => {
                    if !self.apply(command) {
                        return false;
                    }
                }
                Err(crossbeam_channel::TryRecvError::Empty) => return true,
                Err(crossbeam_channel::TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn apply(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(accepted) => self.enqueue(*accepted),
            Command::Score { tokens, reply } => {
                let positions = tokens.len();
                let logits = Vec::with_capacity(positions);
                self.add(Job::Scoring { tokens, logits, reply }, positions, positions);
            }
            Command::Cancel { id } => {
                if let Some(key) = self.named(&id) {
                    self.cancel(key);
                }
            }
            Command::Displace { id, released } => {
                if let Some(key) = self.named(&id) {
                    self.displace(key);
                }
                // Who asked may have gone; then nobody resumes it.
                let _gone = released.send(()).is_err();
            }
            Command::Shutdown => return false,
        }
        true
    }

    /// The generation of a client's id.
    fn named(&self, id: &str) -> Option<SequenceId> {
        self.jobs.iter().find_map(|(key, job)| match job {
            Job::Generation(active) if active.id == id => Some(*key),
            _ => None,
        })
    }

    fn enqueue(&mut self, accepted: Accepted) {
        let Accepted { mut generation, max_tokens, events, ticket, submitted, trace } = accepted;
        let id = generation.id.clone();
        // The last generated token is never fed back, so it needs no position.
        let positions = generation.prompt.len() + (max_tokens as usize).saturating_sub(1);
        let taken = match &mut generation.known {
            Known::Taken(tokens) => std::mem::take(tokens),
            Known::Nothing | Known::Again(_) => Vec::new(),
        };
        let mut sequence = Sequence::new(
            generation,
            max_tokens,
            Arc::clone(&self.end_tokens),
            Arc::clone(&self.tokenizer),
        );
        // Their events are with whoever knew them.
        let ended = sequence.replay(&taken).ended;
        let known = sequence.tokens().len();
        let mut active = Active::new(id, sequence, max_tokens, events, ticket, submitted);
        active.trace = trace;
        match ended {
            None => self.add(Job::Generation(Box::new(active)), known, positions),
            Some(ended) => {
                active.start(self.trunk.worker_stats(), &mut self.stats.requests);
                self.finish(active, ended);
            }
        }
    }

    fn add(&mut self, job: Job, prompt: usize, positions: usize) {
        self.between_steps();
        if let Some(detail) = self.orphan() {
            return self.fail_job(job, GenerationError::Unavailable { detail });
        }
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.scheduler.enqueue(id, prompt, positions);
        self.traced += usize::from(job.trace().is_some());
        self.jobs.insert(id, job);
    }

    /// An expert that nobody can compute now.
    fn orphan(&self) -> Option<String> {
        let transport = &self.transport;
        self.moe_layers.iter().find_map(|&(layer, experts)| {
            let mut missing = (0..experts).filter(|&e| transport.owner(layer, e).is_none());
            let expert = missing.next()?;
            let rescued = transport.has_own_copy(layer) || !transport.stand_ins(layer).is_empty();
            (!rescued).then(|| format!("expert {expert} of layer {layer} has no serving worker"))
        })
    }

    fn start(&mut self, id: SequenceId) {
        if let Some(Job::Generation(active)) = self.jobs.get_mut(&id) {
            active.start(self.trunk.worker_stats(), &mut self.stats.requests);
        }
    }

    fn cancel(&mut self, id: SequenceId) {
        if let Some(Job::Generation(active)) = self.jobs.get_mut(&id)
            && let Some(event) = active.sequence.flush_cancelled()
        {
            active.events.send(event);
        }
        self.end(id, Ended { reason: FinishReason::Cancelled, matched_stop: None });
    }

    /// Ends generations whose client has gone or does not read.
    fn drop_lost_clients(&mut self) {
        let lost = |job: &Job| match job {
            Job::Generation(active) if active.events.is_closed() => Some(None),
            Job::Generation(active) => active.events.overrun().map(Some),
            Job::Scoring { .. } => None,
        };
        let found: Vec<_> =
            self.jobs.iter().filter_map(|(id, job)| Some((*id, lost(job)?))).collect();
        for (id, unread) in found {
            match unread {
                None => {
                    if let Some(Job::Generation(mut active)) = self.remove(id) {
                        trace::within(active.trace.as_deref(), || {
                            tracing::debug!(sequence = id.0, "the client has gone");
                        });
                        self.stats.ended(&active.ended(FinishReason::Cancelled));
                        if let Some(trace) = &mut active.trace {
                            trace.ended(Some("the client has gone".to_owned()));
                        }
                    }
                }
                Some(unread) => self.fail(id, GenerationError::SlowConsumer { unread }),
            }
        }
    }

    fn step(&mut self) {
        let mut buffers = std::mem::take(&mut self.buffers);
        self.scheduler.plan(&mut buffers.spans);
        if !buffers.spans.is_empty() {
            let traced = if self.traced > 0 { self.begin_trace(&buffers.spans) } else { None };
            let begun = Instant::now();
            self.forward(&mut buffers);
            self.settle(&mut buffers, begun);
            if let Some(traced) = traced {
                let trace = self.trunk.trace();
                trace.end();
                traced.end(trace, self.transport.workers(), buffers.tokens.len());
            }
        }
        self.buffers = buffers;
    }

    /// Remembers what the sampled requests of a step need to tell of it.
    fn begin_trace(&mut self, spans: &[Span]) -> Option<TracedStep> {
        let mut traced = TracedStep::begin(self.step);
        for span in spans {
            let Some(job) = self.jobs.get(&span.id) else { continue };
            if let Some(trace) = job.trace()
                && job.is_recorded()
            {
                traced.add(trace, job.decodes(), span.rows, span.first);
            }
        }
        let (above, first) = traced.above()?;
        self.trunk.trace().begin(above, first);
        Some(traced)
    }

    /// Runs the planned rows through the trunk.
    fn forward(&mut self, buffers: &mut StepBuffers) {
        let StepBuffers { spans, tokens, .. } = buffers;
        tokens.clear();
        for span in &*spans {
            let of_sequence = self.jobs.get(&span.id).map_or(&[][..], Job::tokens);
            tokens.extend_from_slice(&of_sequence[span.first..span.first + span.rows]);
        }
        let scheduler = &self.scheduler;
        let attention: Vec<AttentionSpan<'_>> = spans
            .iter()
            .map(|span| AttentionSpan {
                pages: scheduler.pages(span.id),
                first_position: span.first,
                rows: span.rows,
            })
            .collect();
        let rows = StepRows { step: self.step, tokens, spans: &attention };
        let (trunk, cache, transport) = (&mut self.trunk, &mut self.cache, &mut *self.transport);
        trunk.forward(&rows, cache, transport);
        self.step += 1;
    }

    /// Brings the figures up to date for who reads them on other threads. Not inlined, like what counts steps and tokens:
    /// tests/perf/metrics_cost.py finds them by name.
    #[inline(never)]
    fn publish(&mut self) {
        let Self { trunk, scheduler, stats, published, .. } = self;
        let (running, waiting) = scheduler.load();
        let pages = scheduler.allocator();
        (stats.running, stats.waiting) = (running as u64, waiting as u64);
        (stats.kv_pages, stats.kv_pages_free) = (pages.total() as u64, pages.available() as u64);
        stats.workers.clear();
        stats.workers.extend_from_slice(trunk.worker_stats());
        stats.layer_wait = *trunk.layer_waits();
        stats.faults = *trunk.fault_counts();
        (stats.recall, stats.hints) = trunk.recall();
        published.put(stats);
    }

    /// Fails what failed, samples the rest, and moves the scheduler on.
    fn settle(&mut self, buffers: &mut StepBuffers, begun: Instant) {
        let StepBuffers { spans, wanted, .. } = buffers;
        wanted.clear();
        let (mut first, mut decode_rows) = (0, 0);
        for &span in &*spans {
            let rows = first..first + span.rows;
            first = rows.end;
            decode_rows +=
                if self.jobs.get(&span.id).is_some_and(Job::decodes) { span.rows } else { 0 };
            self.scheduler.advance(span);
            if let Some((row, fault)) = self.trunk.faults().first_in(rows.clone()) {
                let error = describe(fault, span.first + row - rows.start);
                self.fail(span.id, error);
                continue;
            }
            match self.jobs.get(&span.id) {
                Some(Job::Scoring { .. }) => wanted.extend(rows.map(|row| (row, span.id))),
                Some(Job::Generation(_)) if span.last => wanted.push((rows.end - 1, span.id)),
                _ => {}
            }
        }
        let mut sampled = Vec::with_capacity(wanted.len());
        for wanted in wanted.chunks(self.max_logit_rows) {
            sampled.extend(self.sample(wanted));
        }
        self.stats.step(first - decode_rows, decode_rows, sampled.len(), begun.elapsed());
        // Who is told that a generation has ended finds its last step in the figures.
        self.publish();
        for (id, sampled) in sampled {
            self.take(id, sampled);
        }
        let scored = spans.iter().filter(|span| span.last);
        scored.for_each(|span| self.finish_scoring(span.id));
    }

    /// Answers a scoring whose last row was computed.
    fn finish_scoring(&mut self, id: SequenceId) {
        let Some(Job::Scoring { logits, .. }) = self.jobs.get(&id) else { return };
        let bad = (0_u32..)
            .zip(logits)
            .find_map(|(position, logits)| Some((position, check_finite(logits).err()?)));
        if let Some((position, error)) = bad {
            return self.fail(
                id,
                GenerationError::Arithmetic { what: error.to_string(), layer: None, position },
            );
        }
        if let Some(Job::Scoring { logits, reply, .. }) = self.remove(id) {
            // Nobody waits any more; the work is done.
            let _gone = reply.send(Ok(logits)).is_err();
        }
    }

    /// Computes logits and lets their owners use them, each on its own.
    fn sample(
        &mut self,
        wanted: &[(usize, SequenceId)],
    ) -> Vec<(SequenceId, Result<Sampled, SamplerError>)> {
        let rows: Vec<usize> = wanted.iter().map(|(row, _)| *row).collect();
        let Self { trunk, jobs, vocab_size, .. } = self;
        let logits = trunk.logits(&rows);
        let mut generating: BTreeMap<SequenceId, &[f32]> = BTreeMap::new();
        for ((_, id), logits) in wanted.iter().zip(logits.chunks_exact(*vocab_size)) {
            match jobs.get_mut(id) {
                Some(Job::Scoring { logits: all, .. }) => all.push(logits.to_vec()),
                _ => {
                    generating.insert(*id, logits);
                }
            }
        }
        let owners = jobs.iter_mut().filter_map(|(id, job)| match (job, generating.get(id)) {
            (Job::Generation(active), Some(logits)) => Some((*id, &mut active.sequence, *logits)),
            _ => None,
        });
        let owners: Vec<(SequenceId, &mut Sequence, &[f32])> = owners.collect();
        owners.into_par_iter().map(|(id, sequence, logits)| (id, sequence.sample(logits))).collect()
    }

    fn take(&mut self, id: SequenceId, sampled: Result<Sampled, SamplerError>) {
        let Some(Job::Generation(active)) = self.jobs.get_mut(&id) else { return };
        match sampled {
            Ok(sampled) => {
                if let Err(Divergence { index, earlier, now }) = active.sequence.check(&sampled) {
                    return self.fail(id, GenerationError::Diverged { index, earlier, now });
                }
                let (event, ended) = active.sequence.push(sampled);
                active.token(&mut self.stats.requests);
                active.events.send(event);
                match ended {
                    Some(ended) => self.end(id, ended),
                    None => self.scheduler.extend(id),
                }
            }
            Err(error) => {
                let position = active.sequence.tokens().len() - 1;
                let position = u32::try_from(position).expect("the context is counted in u32");
                self.fail(
                    id,
                    GenerationError::Arithmetic { what: error.to_string(), layer: None, position },
                );
            }
        }
    }

    fn end(&mut self, id: SequenceId, ended: Ended) {
        if let Some(Job::Generation(active)) = self.remove(id) {
            self.finish(*active, ended);
        }
    }

    fn finish(&mut self, mut active: Active, ended: Ended) {
        self.stats.ended(&active.ended(ended.reason));
        trace::within(active.trace.as_deref(), || {
            let reason = ended.reason;
            tracing::debug!(request_id = active.id, ?reason, "a generation has finished");
        });
        self.publish();
        let finished = active.finish(ended, self.transport.workers(), self.trunk.worker_stats());
        active.release().send(Event::Finished(finished));
    }

    /// Ends a generation whose id somebody else wants, who goes on with it.
    fn displace(&mut self, id: SequenceId) {
        if let Some(Job::Generation(active)) = self.remove(id) {
            self.stats.ended(&active.ended(FinishReason::Cancelled));
            self.publish();
            fail(Job::Generation(active), GenerationError::Displaced);
        }
    }

    fn fail(&mut self, id: SequenceId, error: GenerationError) {
        if let Some(job) = self.remove(id) {
            trace::within(job.trace(), || {
                tracing::warn!(sequence = id.0, %error, "a generation failed");
            });
            self.fail_job(job, error);
        }
    }

    fn fail_job(&mut self, job: Job, error: GenerationError) {
        self.stats.failed(matches!(job, Job::Generation(_)));
        self.publish();
        fail(job, error);
    }

    fn remove(&mut self, id: SequenceId) -> Option<Job> {
        self.scheduler.remove(id);
        let job = self.jobs.remove(&id)?;
        self.traced -= usize::from(job.trace().is_some());
        Some(job)
    }
}

fn describe(fault: &RowFault, position: usize) -> GenerationError {
    match fault {
        RowFault::Unavailable { detail } => GenerationError::Unavailable { detail: detail.clone() },
        RowFault::Arithmetic { layer, what } => GenerationError::Arithmetic {
            what: what.clone(),
            layer: Some(*layer),
            position: u32::try_from(position).expect("the context is counted in u32"),
        },
    }
}

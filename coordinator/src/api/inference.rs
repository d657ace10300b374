//! The inference service itself: what each call does, with or without a socket in between.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::SystemTime;

use shimmer_proto::status as statuses;
use shimmer_proto::trace::{Tracer, names};
use shimmer_proto::v1::{
    self, generate_request, inference_service_server::InferenceService, tokenize_request,
};
use tokio::sync::watch;
use tokio_util::{
    sync::CancellationToken, task::TaskTracker, task::task_tracker::TaskTrackerToken,
};
use tonic::{Request, Response, Status, metadata::MetadataMap};

use super::stream::{About, Source};
use super::{ClusterStatus, GenerateStream, status, validate};
use crate::chat_template::{ChatMessage, ChatTemplate, RenderOptions};
use crate::engine::{EngineHandle, ModelInfo};
use crate::journal::{Acceptance, Accepted, Journal};
use crate::sequence::{Generation, Known};
use crate::tokenizer::{EncodeOptions, TextError, Tokenizer};
use crate::trace::RequestTrace;

/// What the service is made of.
#[derive(Debug)]
pub struct InferenceParts {
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    /// None when the model has none: chats are refused then.
    pub chat_template: Option<Arc<ChatTemplate>>,
    pub cluster: watch::Receiver<ClusterStatus>,
    /// Name of the model in answers.
    pub model_name: String,
    /// Version of this build.
    pub build: String,
}

/// The service. Clones share one engine.
#[derive(Clone, Debug)]
pub struct Inference {
    parts: Arc<InferenceParts>,
    journal: Option<Journal>,
    tracer: Tracer,
    /// Cancelled when nothing new is taken any more.
    draining: CancellationToken,
    /// The streams that are still there.
    streams: TaskTracker,
}

/// A prompt, and the text a chat was rendered to.
#[derive(Debug)]
struct Prompt {
    ids: Vec<u32>,
    rendered: Option<String>,
}

impl Inference {
    /// A service over a running engine.
    pub fn new(parts: InferenceParts) -> Self {
        Self {
            parts: Arc::new(parts),
            journal: None,
            tracer: Tracer::default(),
            draining: CancellationToken::new(),
            streams: TaskTracker::new(),
        }
    }

    /// Writes requests down from now on, so that they can be resumed.
    #[must_use]
    pub fn with_journal(self, journal: Journal) -> Self {
        Self { journal: Some(journal), ..self }
    }

    /// Traces requests from now on.
    #[must_use]
    pub fn with_tracer(self, tracer: Tracer) -> Self {
        Self { tracer, ..self }
    }

    /// The journal, if there is one.
    pub fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    /// Takes nothing new from now on.
    pub(super) fn drain(&self) {
        self.draining.cancel();
        self.streams.close();
    }

    /// Returns when every stream has gone, after [`Self::drain`].
    pub(super) async fn drained(&self) {
        self.streams.wait().await;
    }

    /// Lets a stream begin.
    pub(super) fn enter(&self) -> Result<TaskTrackerToken, Status> {
        // First the token, so that whoever waits for the streams does not miss it.
        let token = self.streams.token();
        if self.draining.is_cancelled() { Err(status::draining()) } else { Ok(token) }
    }

    pub(super) fn about(&self, request_id: String, running: TaskTrackerToken) -> About {
        let (fingerprint, cluster) = (self.fingerprint(), self.cluster());
        About { request_id, fingerprint, cluster, _running: running }
    }

    pub(super) fn tokenizer(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.parts.tokenizer)
    }

    /// Where the state of the workers is published.
    pub(super) fn cluster(&self) -> watch::Receiver<ClusterStatus> {
        self.parts.cluster.clone()
    }

    /// The engine behind it.
    pub fn engine(&self) -> &EngineHandle {
        &self.parts.engine
    }

    fn model(&self) -> &ModelInfo {
        self.parts.engine.model_info()
    }

    fn fingerprint(&self) -> v1::Fingerprint {
        let model = self.model();
        v1::Fingerprint {
            container_digest: model.container_digest.clone(),
            math_id: model.math_id.clone(),
            build: self.parts.build.clone(),
        }
    }

    /// Checks a request and queues its generation. Every refusal comes before the first event.
    ///
    /// # Errors
    /// The status for the client.
    pub async fn start(&self, request: v1::GenerateRequest) -> Result<GenerateStream, Status> {
        self.start_with(request, &MetadataMap::new()).await
    }

    /// As [`Self::start`], with what came beside the request.
    ///
    /// # Errors
    /// The status for the client.
    pub async fn start_with(
        &self,
        request: v1::GenerateRequest,
        metadata: &MetadataMap,
    ) -> Result<GenerateStream, Status> {
        let mut trace = RequestTrace::begin(&self.tracer, metadata);
        let running = self.enter()?;
        let vocab_size = self.model().vocab_size;
        let invalid = |error| status::invalid(&error);
        let id = validate::request_id(request.request_id).map_err(invalid)?;
        let sampling = validate::sampling(request.sampling, vocab_size).map_err(invalid)?;
        let stop = validate::stop(request.stop, vocab_size).map_err(invalid)?;
        let output = validate::output(request.output).map_err(invalid)?;
        let tokenizing = SystemTime::now();
        let prompt = match request.input {
            None => {
                return Err(statuses::invalid_argument(
                    "input",
                    "give one of text, token_ids or chat",
                ));
            }
            Some(generate_request::Input::Text(text)) => {
                self.encode_text(text, EncodeOptions::default()).await?
            }
            Some(generate_request::Input::Chat(chat)) => self.encode_messages(chat).await?.ids,
            Some(generate_request::Input::TokenIds(ids)) => {
                validate::token_ids("token_ids.ids", &ids.ids, vocab_size).map_err(invalid)?;
                ids.ids
            }
        };
        if prompt.is_empty() {
            return Err(statuses::invalid_argument("input", "gives a prompt without tokens"));
        }
        if let Some(trace) = &mut trace {
            trace.span(names::TOKENIZE, [tokenizing, SystemTime::now()]);
            trace.say("shimmer.request_id", id.as_str());
        }
        let known = Known::Nothing;
        let generation = Generation { id: id.clone(), prompt, sampling, stop, output, known };
        let refused = |error| status::submit(&error);
        let limit = self.parts.engine.limit(&generation).map_err(refused)?;
        let accepted = self.journal.as_ref().map(|_| self.accepted(&generation, limit));
        let events = self.parts.engine.submit_traced(generation, trace).map_err(refused)?;
        // The engine has begun; no event leaves before the request is on the drive.
        let (journal, resumable) = match (&self.journal, accepted) {
            (Some(journal), Some(accepted)) => match journal.accept(accepted).await {
                Acceptance::Kept(entry) => (Some(entry), true),
                Acceptance::Without => (None, false),
                Acceptance::Exists => return Err(status::kept(&id)),
            },
            _ => (None, false),
        };
        let source = Source {
            replayed: VecDeque::new(),
            live: Some(events),
            journal,
            resumable,
            after: None,
        };
        Ok(GenerateStream::new(source, self.about(id, running)))
    }

    /// What the journal holds of a new request.
    fn accepted(&self, generation: &Generation, limit: u32) -> Accepted {
        let mut generation = generation.clone();
        generation.stop.max_tokens = Some(limit);
        Accepted {
            container_digest: self.model().container_digest.clone(),
            math_id: self.model().math_id.clone(),
            generation,
        }
    }

    /// Token ids of a text or a chat.
    ///
    /// # Errors
    /// The status for the client.
    pub async fn token_ids(
        &self,
        request: v1::TokenizeRequest,
    ) -> Result<v1::TokenizeResponse, Status> {
        let prompt = match request.input {
            None => return Err(statuses::invalid_argument("input", "give one of text or chat")),
            Some(tokenize_request::Input::Text(text)) => {
                let options = EncodeOptions {
                    add_special: request.add_special_tokens.unwrap_or(true),
                    parse_special: request.parse_special_tokens.unwrap_or(true),
                };
                Prompt { ids: self.encode_text(text, options).await?, rendered: None }
            }
            Some(tokenize_request::Input::Chat(chat)) => {
                for (field, given) in [
                    ("add_special_tokens", request.add_special_tokens),
                    ("parse_special_tokens", request.parse_special_tokens),
                ] {
                    if given.is_some() {
                        return Err(statuses::invalid_argument(
                            field,
                            "is for text only; the template decides for chats",
                        ));
                    }
                }
                self.encode_messages(chat).await?
            }
        };
        Ok(v1::TokenizeResponse { token_ids: prompt.ids, rendered: prompt.rendered })
    }

    /// Text of token ids.
    ///
    /// # Errors
    /// The status for the client.
    pub async fn text(
        &self,
        request: v1::DetokenizeRequest,
    ) -> Result<v1::DetokenizeResponse, Status> {
        validate::token_ids("token_ids", &request.token_ids, self.model().vocab_size)
            .map_err(|error| status::invalid(&error))?;
        let tokenizer = Arc::clone(&self.parts.tokenizer);
        let skip = request.skip_special_tokens.unwrap_or(false);
        let text = off_thread(move || tokenizer.decode(&request.token_ids, skip)).await?;
        Ok(v1::DetokenizeResponse { text })
    }

    /// The model, its limits and its workers.
    pub fn describe(&self) -> v1::GetModelResponse {
        let model = self.model();
        v1::GetModelResponse {
            name: self.parts.model_name.clone(),
            fingerprint: Some(self.fingerprint()),
            architecture: model.architecture.clone(),
            numeric_class: model.numeric_class.clone(),
            context_length: model.context_length,
            vocab_size: model.vocab_size,
            layers: model.layers,
            moe_layers: model.moe_layers,
            experts: model.experts,
            has_chat_template: self.parts.chat_template.is_some(),
            end_token_ids: model.end_token_ids.clone(),
            workers: self.parts.cluster.borrow().workers.clone(),
        }
    }

    async fn encode_text(&self, text: String, options: EncodeOptions) -> Result<Vec<u32>, Status> {
        validate::text("text", text.len()).map_err(|error| status::invalid(&error))?;
        let tokenizer = Arc::clone(&self.parts.tokenizer);
        off_thread(move || tokenizer.encode(&text, options))
            .await?
            .map_err(|error| text_status("text", &error))
    }

    async fn encode_messages(&self, chat: v1::Chat) -> Result<Prompt, Status> {
        validate::chat(&chat).map_err(|error| status::invalid(&error))?;
        let Some(template) = self.parts.chat_template.clone() else {
            let message = "this model has no chat template; send text or token ids";
            return Err(statuses::failed_precondition("NO_CHAT_TEMPLATE", message));
        };
        let tokenizer = Arc::clone(&self.parts.tokenizer);
        let (ids, rendered) = off_thread(move || {
            let messages: Vec<ChatMessage> = chat
                .messages
                .into_iter()
                .map(|message| ChatMessage::new(message.role, message.content))
                .collect();
            let options = RenderOptions {
                add_generation_prompt: chat.add_generation_prompt.unwrap_or(true),
                unix_seconds: unix_seconds(),
                ..RenderOptions::default()
            };
            template.encode_chat(&tokenizer, &messages, &options)
        })
        .await?
        .map_err(|error| text_status("chat", &error))?;
        Ok(Prompt { ids, rendered: Some(rendered) })
    }
}

/// What templates that state the date get for it.
fn unix_seconds() -> Option<i64> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

/// Runs work that may take long for long input where it does not hold up the sockets.
pub(super) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| statuses::internal("TOKENIZER", "tokenizing stopped half-way"))
}

fn text_status(field: &str, error: &TextError) -> Status {
    if error.is_bad_request() {
        statuses::invalid_argument(field, error.to_string())
    } else {
        statuses::internal("TOKENIZER", error.to_string())
    }
}

#[tonic::async_trait]
impl InferenceService for Inference {
    type GenerateStream = GenerateStream;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<GenerateStream>, Status> {
        let (metadata, _, request) = request.into_parts();
        Ok(Response::new(self.start_with(request, &metadata).await?))
    }

    type ResumeStream = GenerateStream;

    async fn resume(
        &self,
        request: Request<v1::ResumeRequest>,
    ) -> Result<Response<GenerateStream>, Status> {
        Ok(Response::new(self.resume_stream(request.into_inner()).await?))
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        Ok(Response::new(self.token_ids(request.into_inner()).await?))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        Ok(Response::new(self.text(request.into_inner()).await?))
    }

    async fn get_model(
        &self,
        _: Request<v1::GetModelRequest>,
    ) -> Result<Response<v1::GetModelResponse>, Status> {
        Ok(Response::new(self.describe()))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        let id = request.into_inner().request_id;
        if id.is_empty() {
            return Err(statuses::invalid_argument("request_id", "is empty"));
        }
        Ok(Response::new(v1::CancelResponse { cancelled: self.parts.engine.cancel(&id) }))
    }
}

//! `shimmer tokenize` and `shimmer detokenize`: what a coordinator makes of a text.

use clap::Args;
use serde_json::json;
use shimmer_proto::v1::{
    Chat, ChatMessage, DetokenizeRequest, TokenizeRequest, tokenize_request::Input,
};

use crate::{
    backend::Backend,
    block_on,
    config::{Access, ApiAddress, Endpoints, Target},
    error::Error,
    output,
};

const TOKENIZE_EXAMPLES: &str = "\
Examples:
  shimmer tokenize 'Once upon a time'
  shimmer tokenize --chat 'Hello' --json
  shimmer tokenize 'Hello' --endpoint https://models.example:50051 --ca ca.pem --api-key-file key";

/// Who is asked.
#[derive(Debug, Args)]
struct CoordinatorArgs {
    /// Coordinators as host:port, or https://host:port where they speak TLS; the first one that can be reached answers
    #[arg(
        long,
        env = "SHIMMER_ENDPOINT",
        value_name = "ADDRESS,...",
        value_delimiter = ',',
        default_value = "localhost:50051"
    )]
    endpoint: Vec<ApiAddress>,
    #[command(flatten)]
    access: Access,
}

impl CoordinatorArgs {
    async fn open(&self) -> Result<Backend, Error> {
        let endpoints = Endpoints::new(self.endpoint.clone(), self.access.clone());
        Backend::open(Target::Endpoint(endpoints)).await
    }
}

/// Flags of `shimmer tokenize`.
#[derive(Debug, Args)]
#[command(after_help = TOKENIZE_EXAMPLES)]
pub struct TokenizeArgs {
    /// The text
    #[arg(value_name = "TEXT", required_unless_present = "chat", conflicts_with = "chat")]
    text: Option<String>,
    /// A user's message instead, rendered by the model's chat template
    #[arg(long, value_name = "TEXT")]
    chat: Option<String>,
    /// Leaves out what the tokenizer adds around a text, such as a start token
    #[arg(long, conflicts_with = "chat")]
    no_special: bool,
    /// Takes control markers in the text as text
    #[arg(long, conflicts_with = "chat")]
    plain: bool,
    /// One JSON object instead of the ids
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

/// Flags of `shimmer detokenize`.
#[derive(Debug, Args)]
pub struct DetokenizeArgs {
    /// Token ids
    #[arg(value_name = "ID,...", value_delimiter = ',', required = true)]
    token_ids: Vec<u32>,
    /// Leaves out special tokens
    #[arg(long)]
    skip_special: bool,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

/// Shows token ids.
///
/// # Errors
/// The coordinator cannot be reached or refuses the text.
pub fn tokenize(args: &TokenizeArgs) -> Result<(), Error> {
    let input = match (&args.text, &args.chat) {
        (_, Some(content)) => {
            let message = ChatMessage { role: "user".to_owned(), content: content.clone() };
            Input::Chat(Chat { messages: vec![message], add_generation_prompt: None })
        }
        (text, None) => Input::Text(text.clone().unwrap_or_default()),
    };
    let request = TokenizeRequest {
        input: Some(input),
        add_special_tokens: args.no_special.then_some(false),
        parse_special_tokens: args.plain.then_some(false),
    };
    let response = block_on(async { args.coordinator.open().await?.tokenize(request).await })?;
    if args.json {
        return output::json(
            &json!({ "token_ids": response.token_ids, "rendered": response.rendered }),
        );
    }
    let ids: Vec<String> = response.token_ids.iter().map(u32::to_string).collect();
    output::line(&ids.join(","))
}

/// Shows text.
///
/// # Errors
/// The coordinator cannot be reached or refuses an id.
pub fn detokenize(args: &DetokenizeArgs) -> Result<(), Error> {
    let request = DetokenizeRequest {
        token_ids: args.token_ids.clone(),
        skip_special_tokens: args.skip_special.then_some(true),
    };
    output::line(&block_on(async { args.coordinator.open().await?.detokenize(request).await })?)
}

//! What to generate from, and what to show.

use std::{io::Read as _, num::NonZeroU32, path::PathBuf, str::FromStr};

use clap::Args;
use shimmer_proto::v1::{Chat, ChatMessage, TokenIds, generate_request::Input};

use crate::error::Error;

/// Flags of one generation that are not settings.
#[derive(Debug, Clone, Args)]
#[group(id = "what")]
pub struct InputArgs {
    /// Text to continue; control markers in it are recognised
    #[arg(long, value_name = "TEXT", help_heading = "Prompt", group = "source")]
    pub prompt: Option<String>,

    /// File with the text to continue, or - for standard input; taken as it is, with its last line break
    #[arg(long, value_name = "FILE", help_heading = "Prompt", group = "source")]
    pub prompt_file: Option<PathBuf>,

    /// Token ids to continue
    #[arg(
        long,
        value_name = "ID,...",
        allow_negative_numbers = true,
        value_delimiter = ',',
        help_heading = "Prompt",
        group = "source"
    )]
    pub token_ids: Option<Vec<u32>>,

    /// A made-up prompt of so many tokens, the same every time; for measurements
    #[arg(
        long,
        value_name = "COUNT",
        allow_negative_numbers = true,
        help_heading = "Prompt",
        group = "source"
    )]
    pub prompt_tokens: Option<NonZeroU32>,

    /// A user's message, rendered by the model's chat template
    #[arg(long, value_name = "TEXT", help_heading = "Prompt", group = "source")]
    pub chat: Option<String>,

    /// System message before the user's
    #[arg(long, value_name = "TEXT", help_heading = "Prompt", requires = "chat")]
    pub system: Option<String>,

    /// Adds to the logit of a token, for example 50256=-100; may be repeated
    #[arg(long, value_name = "ID=NUMBER", value_delimiter = ',', help_heading = "Sampling")]
    pub logit_bias: Vec<LogitBias>,

    /// Text that ends the answer and is not part of it; may be repeated
    #[arg(long, value_name = "TEXT", help_heading = "Sampling")]
    pub stop: Vec<String>,

    /// Tokens that end the answer
    #[arg(
        long,
        value_name = "ID,...",
        allow_negative_numbers = true,
        value_delimiter = ',',
        help_heading = "Sampling"
    )]
    pub stop_token_ids: Vec<u32>,

    /// Log-probabilities of each token and of this many best ones, at most 20; shown by --json
    #[arg(
        long,
        value_name = "COUNT",
        allow_negative_numbers = true,
        help_heading = "Output",
        requires = "json"
    )]
    pub logprobs: Option<u32>,

    /// One JSON object on one line instead of the text: tokens, text, finish_reason, logits_sha256, fingerprint,
    /// timings, workers, and profile with --profile
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// SHA-256 over all logits and tokens; on with --json, costs a little time per token
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        help_heading = "Output")]
    pub logits_digest: Option<bool>,

    /// Shows the text of special tokens
    #[arg(long, help_heading = "Output")]
    pub show_special: bool,

    /// Generates so many times in a row, for measurements
    #[arg(
        long,
        value_name = "COUNT",
        allow_negative_numbers = true,
        default_value = "1",
        help_heading = "Output"
    )]
    pub repeat: NonZeroU32,

    /// Name of the request in the coordinator's logs
    #[arg(long, value_name = "NAME", help_heading = "Output")]
    pub request_id: Option<String>,
}

/// A token and what is added to its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBias {
    pub token: u32,
    pub bias: f32,
}

/// Why a text is not a [`LogitBias`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a token id and a number, for example 50256=-100")]
pub struct ParseLogitBiasError(String);

impl FromStr for LogitBias {
    type Err = ParseLogitBiasError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text.split_once('=').and_then(|(token, bias)| {
            Some(Self { token: token.trim().parse().ok()?, bias: bias.trim().parse().ok()? })
        });
        parsed.ok_or_else(|| ParseLogitBiasError(text.to_owned()))
    }
}

impl InputArgs {
    /// Refuses flags that do not fit together, before a model is loaded.
    pub(super) fn check(&self) -> Result<(), Error> {
        let given = [
            self.prompt.is_some(),
            self.prompt_file.is_some(),
            self.token_ids.is_some(),
            self.prompt_tokens.is_some(),
            self.chat.is_some(),
        ];
        if !given.contains(&true) {
            return Err(Error::refused("there is nothing to generate from").with_hint(
                "give --chat, --prompt, --prompt-file, --token-ids or --prompt-tokens",
            ));
        }
        let mut tokens: Vec<u32> = self.logit_bias.iter().map(|bias| bias.token).collect();
        tokens.sort_unstable();
        if let Some(pair) = tokens.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::refused(format!("--logit-bias names token {} twice", pair[0])));
        }
        Ok(())
    }

    /// A made-up prompt takes its tokens from the vocabulary.
    pub(super) fn needs_vocabulary(&self) -> bool {
        self.prompt_tokens.is_some()
    }

    /// The prompt.
    pub(super) fn read(&self, vocab_size: u32) -> Result<Input, Error> {
        if let Some(text) = &self.prompt {
            return Ok(Input::Text(text.clone()));
        }
        if let Some(path) = &self.prompt_file {
            return Ok(Input::Text(read_text(path)?));
        }
        if let Some(ids) = &self.token_ids {
            return Ok(Input::TokenIds(TokenIds { ids: ids.clone() }));
        }
        if let Some(count) = self.prompt_tokens {
            return Ok(Input::TokenIds(TokenIds { ids: synthetic(count.get(), vocab_size) }));
        }
        let message = |role: &str, content: &String| ChatMessage {
            role: role.to_owned(),
            content: content.clone(),
        };
        let messages = self
            .system
            .iter()
            .map(|content| message("system", content))
            .chain(self.chat.iter().map(|content| message("user", content)))
            .collect();
        Ok(Input::Chat(Chat { messages, add_generation_prompt: None }))
    }
}

fn read_text(path: &std::path::Path) -> Result<String, Error> {
    let (name, bytes) = if path.as_os_str() == "-" {
        let mut bytes = Vec::new();
        (
            "standard input".to_owned(),
            std::io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes),
        )
    } else {
        (path.display().to_string(), std::fs::read(path))
    };
    let bytes = bytes
        .map_err(|error| Error::failed(format!("cannot read the prompt from {name}"), error))?;
    String::from_utf8(bytes)
        .map_err(|error| Error::failed(format!("the prompt in {name} is not UTF-8"), error))
}

/// `count` token ids below `vocab_size`, spread over the vocabulary by a fixed multiplicative walk.
pub(in crate::commands) fn synthetic(count: u32, vocab_size: u32) -> Vec<u32> {
    // 2^32 divided by the golden ratio: steps of it visit any range evenly.
    const STEP: u32 = 0x9E37_79B9;
    let spread = |index: u32| (u64::from(index.wrapping_mul(STEP)) * u64::from(vocab_size)) >> 32;
    (1..=count)
        .map(|index| u32::try_from(spread(index)).expect("below a 32-bit vocabulary size"))
        .collect()
}

//! Chat messages to the prompt that the model was trained on.

mod values;

use minijinja::Environment;
use serde_json::{Map, Value};

use crate::tokenizer::{EncodeOptions, TextError, Tokenizer};

/// One message of a chat.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`; the template decides what it accepts.
    pub role: String,
    /// The text.
    pub content: String,
    /// Further fields that a template may read, such as `tool_calls` or `reasoning_content`.
    pub extra: Map<String, Value>,
}

impl ChatMessage {
    /// A message of role and content alone.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), extra: Map::new() }
    }
}

/// The clock behind `strftime_now`, always in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Clock {
    /// The time of the call.
    #[default]
    System,
    /// Seconds since 1970.
    Fixed(i64),
}

/// What a template gets besides the messages.
#[derive(Debug, Clone, PartialEq)]
pub struct RenderOptions {
    /// Appends the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// JSON schemas of tools.
    pub tools: Option<Vec<Value>>,
    /// Further variables, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// What time it is for the template.
    pub clock: Clock,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            tools: None,
            variables: Map::new(),
            clock: Clock::System,
        }
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` are the named special tokens that exist, such as `bos_token`.
    ///
    /// # Errors
    /// When the template does not compile.
    pub fn new(
        source: &str,
        special_tokens: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        for (name, token) in special_tokens {
            environment.add_global(name, token);
        }
        environment
            .add_template_owned("chat", source.to_owned())
            .map_err(|error| TextError::Template { detail: error.to_string() })?;
        Ok(Self { environment })
    }

    /// Takes the template from `chat_template.jinja`, or else from `tokenizer_config.json`. `None` when neither has one.
    ///
    /// # Errors
    /// When the config does not parse or the template does not compile.
    pub fn from_files(
        chat_template_jinja: Option<&str>,
        tokenizer_config: Option<&[u8]>,
    ) -> Result<Option<Self>, TextError> {
        let config = tokenizer_config
            .map(crate::tokenizer::TokenizerConfig::parse)
            .transpose()?
            .unwrap_or_default();
        let source = match (chat_template_jinja, &config.chat_template) {
            (Some(source), _) => source.to_owned(),
            (None, Some(Value::String(source))) => source.clone(),
            (None, _) => return Ok(None),
        };
        let special =
            config.special.iter().map(|(name, token)| ((*name).to_owned(), token.clone()));
        Self::new(&source, special).map(Some)
    }

    /// Renders a chat as text.
    ///
    /// # Errors
    /// [`TextError::Refused`] with the template's own words, or what went wrong inside it.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &RenderOptions,
    ) -> Result<String, TextError> {
        let template = self
            .environment
            .get_template("chat")
            .map_err(|error| TextError::Template { detail: error.to_string() })?;
        let context = values::context(messages, options);
        template.render(context).map_err(|error| TextError::Render { detail: error.to_string() })
    }

    /// Renders a chat and encodes it: the template's own control markers are tokens, the same letters inside a message
    /// are text. Returns the ids and the rendered text.
    ///
    /// # Errors
    /// As [`render`](Self::render) and [`Tokenizer::encode`].
    pub fn encode_chat(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        options: &RenderOptions,
    ) -> Result<(Vec<u32>, String), TextError> {
        let text = self.render(messages, options)?;
        let ids =
            tokenizer.encode(&text, EncodeOptions { add_special: false, parse_special: true })?;
        Ok((ids, text))
    }
}

//! Chat messages to the prompt that the model was trained on.
//!
//! Renders the checkpoint's own Jinja template as transformers does: same whitespace rules, same filters and methods,
//! same variables. Templates come from the internet, so a render has a budget of steps and memory. The clock is an
//! argument: a prompt depends on the request alone.

mod environment;
mod guard;
mod json;
mod methods;
mod python;
mod source;
mod strftime;
#[cfg(test)]
mod tests;
mod values;

use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};

use crate::tokenizer::{CONFIG_FILE, TextError, Tokenizer, TokenizerConfig};
use environment::Raised;
use values::Inputs;

/// Steps that one render may take. A step is an instruction of the template or 64 bytes that it produces, so this
/// bounds a render to about 256 MB and half a second. A chat of the largest message that the API accepts (16 MiB),
/// copied eight times on its way, takes 2 million.
const FUEL: u64 = 4_000_000;

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// One message of a chat.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`; the template decides what it accepts.
    pub role: String,
    /// The text.
    pub content: String,
    /// Further fields that a template may read, such as `tool_calls` or `reasoning_content`. A field named `content`
    /// takes the place of the text.
    pub extra: Map<String, Value>,
}

impl ChatMessage {
    /// A message of role and content alone.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), extra: Map::new() }
    }
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
    /// Seconds since 1970 for `strftime_now`, which shows them in UTC. Without it a template that asks for the time
    /// fails.
    pub unix_seconds: Option<i64>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, tools: None, variables: Map::new(), unix_seconds: None }
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The sources of all named templates, to choose characters that none of them contains.
    sources: String,
    has_tool_use: bool,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` are the named special tokens that exist, such as `bos_token`; a name that
    /// is absent stays undefined in the template.
    ///
    /// # Errors
    /// When the template does not compile.
    pub fn new(
        source: &str,
        special_tokens: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, TextError> {
        Self::compile(&[(DEFAULT, source)], special_tokens)
    }

    /// Takes the template from `chat_template.jinja`, or else from `tokenizer_config.json`, where it is a string or a
    /// list of named templates. `None` when neither has one.
    ///
    /// # Errors
    /// When the config does not parse or the template does not compile.
    pub fn from_files(
        chat_template_jinja: Option<&str>,
        tokenizer_config: Option<&[u8]>,
    ) -> Result<Option<Self>, TextError> {
        let config = tokenizer_config.map(TokenizerConfig::parse).transpose()?.unwrap_or_default();
        let sources = match (chat_template_jinja, &config.chat_template) {
            (Some(source), _) => vec![(DEFAULT, source)],
            (None, Some(Value::String(source))) => vec![(DEFAULT, source.as_str())],
            (None, Some(Value::Array(named))) => named_templates(named)?,
            (None, None) => return Ok(None),
            (None, Some(_)) => {
                return Err(TextError::file(
                    CONFIG_FILE,
                    "chat_template",
                    "expected a string or a list",
                ));
            }
        };
        let special =
            config.special.iter().map(|(name, token)| ((*name).to_owned(), token.clone()));
        Self::compile(&sources, special).map(Some)
    }

    fn compile(
        sources: &[(&str, &str)],
        special_tokens: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, TextError> {
        let mut environment = environment::build();
        environment.set_fuel(Some(FUEL));
        for (name, token) in special_tokens {
            environment.add_global(name, token);
        }
        for (name, source) in sources {
            environment
                .add_template_owned((*name).to_owned(), source::prepare(source))
                .map_err(|error| TextError::Template { detail: describe(&error) })?;
        }
        let has_tool_use = sources.iter().any(|(name, _)| *name == TOOL_USE);
        let sources = sources.iter().map(|(_, source)| *source).collect();
        Ok(Self { environment, sources, has_tool_use })
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
        self.render_inputs(&Inputs::new(messages, options))
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
        guard::encode_chat(self, tokenizer, &Inputs::new(messages, options))
    }

    fn render_inputs(&self, inputs: &Inputs) -> Result<String, TextError> {
        let name = if self.has_tool_use && inputs.has_tools() { TOOL_USE } else { DEFAULT };
        let template = self
            .environment
            .get_template(name)
            .map_err(|error| TextError::Template { detail: describe(&error) })?;
        template.render(inputs.context()).map_err(|error| classify(&error))
    }
}

fn named_templates(named: &[Value]) -> Result<Vec<(&str, &str)>, TextError> {
    let mut sources = Vec::new();
    for (index, entry) in named.iter().enumerate() {
        let text = |field: &str| {
            entry.get(field).and_then(Value::as_str).ok_or_else(|| {
                TextError::file(
                    CONFIG_FILE,
                    format!("chat_template[{index}].{field}"),
                    "expected a string",
                )
            })
        };
        let (name, template) = (text("name")?, text("template")?);
        if name == DEFAULT || name == TOOL_USE {
            sources.push((name, template));
        }
    }
    if sources.iter().any(|(name, _)| *name == DEFAULT) {
        Ok(sources)
    } else {
        Err(TextError::file(
            CONFIG_FILE,
            "chat_template",
            "the list has no template named \"default\"",
        ))
    }
}

fn classify(error: &minijinja::Error) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref::<Raised>() {
            return TextError::Refused { message: message.clone() };
        }
        if current
            .downcast_ref::<minijinja::Error>()
            .is_some_and(|inner| inner.kind() == ErrorKind::OutOfFuel)
        {
            return TextError::TooExpensive { fuel: FUEL };
        }
        cause = current.source();
    }
    TextError::Render { detail: describe(error) }
}

/// One line: what, and where in the template.
fn describe(error: &minijinja::Error) -> String {
    let what = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

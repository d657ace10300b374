//! What can go wrong between text and tokens.

/// Failures of the tokenizer, the chat template and their files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A tokenizer file cannot be used. `field` is a path inside the file, empty when the file as a whole is meant.
    #[error("read {file}{}: {detail}", field_suffix(.field))]
    File {
        /// Name of the file inside the checkpoint.
        file: &'static str,
        /// Path of the offending field inside the file.
        field: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The tokenizer could not turn a text into ids.
    #[error("tokenize text: {detail}")]
    Encode {
        /// What the tokenizer reports.
        detail: String,
    },
    /// The chat template itself does not compile.
    #[error("compile chat template: {detail}")]
    Template {
        /// What the compiler reports, with the line.
        detail: String,
    },
    /// The chat template refused these messages by `raise_exception`; the text is the template's own.
    #[error("chat template refuses the messages: {message}")]
    Refused {
        /// The template's own words.
        message: String,
    },
    /// The chat template failed on these messages.
    #[error("render chat template: {detail}")]
    Render {
        /// What the renderer reports, with the line.
        detail: String,
    },
    /// Rendering these messages needs more steps or memory than a request may use.
    #[error("render chat template: the limit of {fuel} steps is used up")]
    TooExpensive {
        /// The limit in force for this request.
        fuel: u64,
    },
}

impl TextError {
    /// Whether the request is at fault (and not the checkpoint).
    #[must_use]
    pub fn is_bad_request(&self) -> bool {
        !matches!(self, Self::File { .. } | Self::Template { .. })
    }

    pub(crate) fn file(
        file: &'static str,
        field: impl Into<String>,
        detail: impl Into<String>,
    ) -> Self {
        Self::File { file, field: field.into(), detail: detail.into() }
    }
}

fn field_suffix(field: &str) -> String {
    if field.is_empty() { String::new() } else { format!(", field {field}") }
}

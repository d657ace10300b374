//! One finding.

use serde_json::{Value, json};

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing need be done.
    Note,
    /// It works, but slower or less safely than it could.
    Warn,
    /// It will not work.
    Fail,
}

impl Level {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// What was found, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// What was looked at.
    pub(crate) check: String,
    pub(crate) level: Level,
    pub(crate) found: String,
    /// One command or line.
    pub(crate) fix: Option<String>,
}

impl Finding {
    pub(crate) fn new(check: &str, level: Level, found: impl Into<String>) -> Self {
        Self { check: check.to_owned(), level, found: found.into(), fix: None }
    }

    pub(crate) fn ok(check: &str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Ok, found)
    }

    pub(crate) fn note(check: &str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Note, found)
    }

    pub(crate) fn warn(check: &str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Warn, found)
    }

    pub(crate) fn fail(check: &str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Fail, found)
    }

    /// What could not be read. That is no fault: a container hides much.
    pub(crate) fn unread(check: &str, why: &str) -> Self {
        Self::new(check, Level::Note, format!("could not be read: {why}"))
    }

    #[must_use]
    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "check": self.check,
            "level": self.level.name(),
            "found": self.found,
            "fix": self.fix,
        })
    }
}

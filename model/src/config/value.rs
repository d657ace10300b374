//! Typed access to the keys of a `config.json`, with errors that name file and key.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// A JSON object of a configuration file. A key that is `null` counts as absent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block<'a> {
    file: &'a Path,
    /// Name of the enclosing key, empty at the top.
    name: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Block<'a> {
    pub(super) fn new(file: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { file, name: "", map }
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, value)| !value.is_null()).map(|(key, _)| key.as_str())
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The full name of a key, for messages.
    pub(super) fn full(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    pub(super) fn error(
        &self,
        key: &str,
        problem: impl Into<String>,
        hint: impl Into<String>,
    ) -> Error {
        Error::Config {
            file: self.file.to_path_buf(),
            key: self.full(key),
            problem: problem.into(),
            hint: hint.into(),
        }
    }

    fn wrong(&self, key: &str, wanted: &str, found: &Value) -> Error {
        self.error(
            key,
            format!("expected {wanted}, found {found}"),
            "restore config.json from the model's publisher",
        )
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| {
            self.error(
                key,
                "the key is missing",
                "restore config.json from the model's publisher; no value is assumed",
            )
        })
    }

    pub(super) fn block(&self, key: &'a str) -> Result<Option<Block<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Block { file: self.file, name: key, map })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    pub(super) fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        // Above this no dimension of a model is believable, and products of two stay far below 2^64.
        const LIMIT: u64 = 1 << 31;
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().ok_or_else(|| self.wrong(key, "a whole number", value))?;
        let number = Some(number).filter(|&n| n < LIMIT).and_then(|n| usize::try_from(n).ok());
        number.map(Some).ok_or_else(|| self.wrong(key, "a whole number below 2^31", value))
    }

    pub(super) fn usize(&self, key: &str) -> Result<usize> {
        self.required(key, self.opt_usize(key)?)
    }

    /// A whole number that is at least 1.
    pub(super) fn positive(&self, key: &str) -> Result<usize> {
        let value = self.usize(key)?;
        if value == 0 {
            Err(self.wrong(key, "a number above 0", &Value::from(0)))
        } else {
            Ok(value)
        }
    }

    pub(super) fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.wrong(key, "a number", value)),
        }
    }

    pub(super) fn f64(&self, key: &str) -> Result<f64> {
        self.required(key, self.opt_f64(key)?)
    }

    pub(super) fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, "true or false", value))
    }

    pub(super) fn bool(&self, key: &str) -> Result<bool> {
        self.required(key, self.opt_bool(key)?)
    }

    pub(super) fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string", value))
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value
            .as_array()
            .map(|list| Some(list.as_slice()))
            .ok_or_else(|| self.wrong(key, "a list", value))
    }

    /// Token ids: one number, a list of numbers, or nothing.
    pub(super) fn token_ids(&self, key: &str) -> Result<Option<Vec<u32>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let id = |value: &Value| {
            value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| self.wrong(key, "token ids", value))
        };
        match value {
            Value::Array(list) => Ok(Some(list.iter().map(id).collect::<Result<_>>()?)),
            one => Ok(Some(vec![id(one)?])),
        }
    }

    /// The value of the only one of several spellings that is present; two that disagree are refused.
    pub(super) fn one_of<T: PartialEq + std::fmt::Debug>(
        &self,
        keys: &[&str],
        read: impl Fn(&Self, &str) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut found: Option<(&str, T)> = None;
        for key in keys {
            let Some(value) = read(self, key)? else { continue };
            match &found {
                Some((first, other)) if *other != value => {
                    return Err(self.error(
                        key,
                        format!("{value:?} contradicts {first} = {other:?}"),
                        "remove the one that is wrong",
                    ));
                }
                Some(_) => {}
                None => found = Some((key, value)),
            }
        }
        Ok(found.map(|(_, value)| value))
    }
}

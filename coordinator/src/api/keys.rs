//! Keys that clients show: read from a file, followed as it changes, compared without telling by time.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use shimmer_proto::{
    followed::{FileError, Followed},
    status,
};
use tonic::{Status, metadata::MetadataMap};

/// Shorter keys can be guessed.
const MIN_KEY_BYTES: usize = 16;
/// Longer keys fit into no header.
const MAX_KEY_BYTES: usize = 1024;
/// More keys make each call slower, because each is compared with all.
const MAX_KEYS: usize = 4096;
/// Longest name of a key, bytes.
const MAX_NAME_BYTES: usize = 64;

/// How a client sends its key.
const HOW: &str = "send the header `authorization: Bearer KEY` (shimmer: --api-key-file FILE, or \
    the variable SHIMMER_API_KEY)";

/// The keys that are let in. Clones share them.
#[derive(Debug, Clone)]
pub struct ApiKeys(Arc<Followed<KeyRing>>);

/// What the file holds. Keys stand here as hashes only.
#[derive(Debug)]
struct KeyRing(Vec<Key>);

#[derive(Debug)]
struct Key {
    name: String,
    hash: blake3::Hash,
}

/// Why a call is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRefusal {
    /// No key was sent, or not in the form that is understood.
    Missing,
    /// A key that is not in the file.
    Unknown,
}

impl KeyRefusal {
    /// UNAUTHENTICATED with what the client can do.
    pub fn status(self) -> Status {
        match self {
            Self::Missing => status::unauthenticated(
                "MISSING_API_KEY",
                format!("this server asks for an API key: {HOW}"),
            ),
            Self::Unknown => status::unauthenticated(
                "UNKNOWN_API_KEY",
                "this server does not know the API key; it may have been withdrawn",
            ),
        }
    }
}

impl ApiKeys {
    /// Reads a file of keys: one on each line, `key` or `name:key`; empty lines and those that begin with `#` are none.
    ///
    /// # Errors
    /// Names the file and the line that cannot be used. A file without any key is refused: it would let nobody in.
    pub fn load(file: PathBuf) -> Result<Self, FileError> {
        let named = file.clone();
        let make = move |contents: &[Vec<u8>]| parse(&named, &contents[0]);
        Ok(Self(Arc::new(Followed::load("API keys", vec![file], make)?)))
    }

    /// Whether the file cannot be used as it is now, so that older keys are let in.
    pub fn are_outdated(&self) -> bool {
        self.0.is_outdated()
    }

    /// The name of the key that a call shows, empty for a key without one.
    ///
    /// # Errors
    /// There is no key, or an unknown one.
    pub fn check(&self, metadata: &MetadataMap) -> Result<String, KeyRefusal> {
        let header = metadata.get("authorization").ok_or(KeyRefusal::Missing)?;
        let text = header.to_str().map_err(|_| KeyRefusal::Missing)?;
        let (scheme, key) = text.split_once(' ').ok_or(KeyRefusal::Missing)?;
        let key = key.trim();
        if !scheme.eq_ignore_ascii_case("bearer") || key.is_empty() {
            return Err(KeyRefusal::Missing);
        }
        self.0.current().find(key).ok_or(KeyRefusal::Unknown)
    }
}

impl KeyRing {
    /// Hashes are compared in constant time, and all of them, so that neither content nor place shows in the time.
    fn find(&self, key: &str) -> Option<String> {
        let hash = blake3::hash(key.as_bytes());
        let mut found = None;
        for known in &self.0 {
            if known.hash == hash {
                found = Some(known.name.clone());
            }
        }
        found
    }
}

fn parse(file: &Path, bytes: &[u8]) -> Result<KeyRing, FileError> {
    let refuse =
        |line: usize, reason: String| FileError::new(file, format!("line {line}: {reason}"));
    let text =
        std::str::from_utf8(bytes).map_err(|_| FileError::new(file, "is not text in UTF-8"))?;
    let mut keys: Vec<Key> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let (number, line) = (index + 1, line.trim());
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, key) = line.split_once(':').unwrap_or(("", line));
        let (name, key) = (name.trim(), key.trim());
        if name.len() > MAX_NAME_BYTES || name.chars().any(|c| c.is_control() || c == ' ') {
            let reason =
                format!("the name before `:` has spaces or more than {MAX_NAME_BYTES} bytes");
            return Err(refuse(number, reason));
        }
        if !(MIN_KEY_BYTES..=MAX_KEY_BYTES).contains(&key.len()) {
            let reason = format!(
                "the key has {} characters; {MIN_KEY_BYTES} to {MAX_KEY_BYTES} are allowed. `openssl rand -hex 32` makes one",
                key.len()
            );
            return Err(refuse(number, reason));
        }
        if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            let reason =
                "the key has a space or a character outside ASCII, which no header carries";
            return Err(refuse(number, reason.to_owned()));
        }
        let hash = blake3::hash(key.as_bytes());
        if keys.iter().any(|known| known.hash == hash) {
            return Err(refuse(number, "the key stands in the file twice".to_owned()));
        }
        if keys.len() == MAX_KEYS {
            return Err(refuse(number, format!("more than {MAX_KEYS} keys")));
        }
        keys.push(Key { name: name.to_owned(), hash });
    }
    if keys.is_empty() {
        let reason =
            "no key in it, so nobody could be let in; write one per line, `key` or `name:key`";
        return Err(FileError::new(file, reason));
    }
    Ok(KeyRing(keys))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "0123456789abcdef";
    const TWO: &str = "fedcba9876543210";

    fn check(text: &str, expected: Result<&[&str], &str>) {
        match (parse(Path::new("keys"), text.as_bytes()), expected) {
            (Ok(ring), Ok(names)) => {
                assert_eq!(ring.0.iter().map(|key| &key.name[..]).collect::<Vec<_>>(), names);
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, expected) => panic!("{text:?} gives {found:?}, not {expected:?}"),
        }
    }

    #[test]
    fn a_file_has_a_key_on_each_line() {
        check(&format!("# of the lab\n\n{ONE}\n  alice: {TWO} \n"), Ok(&["", "alice"]));
        check("", Err("keys: no key in it"));
        check("# nothing\n", Err("no key in it"));
        check(&format!("{ONE}\nshort\n"), Err("keys: line 2: the key has 5 characters"));
        check(&format!("{ONE}\na:{ONE}\n"), Err("line 2: the key stands in the file twice"));
        check("0123456789 abcdef", Err("line 1: the key has a space"));
        check("0123456789abcdé0", Err("outside ASCII"));
        check(&format!("two words:{ONE}"), Err("the name before `:` has spaces"));
        check(&"k".repeat(MAX_KEY_BYTES + 1), Err("are allowed"));
    }

    fn shown(header: Option<&str>) -> Result<String, KeyRefusal> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("keys");
        std::fs::write(&file, format!("{ONE}\nalice:{TWO}\n")).unwrap();
        let mut metadata = MetadataMap::new();
        if let Some(header) = header {
            metadata.insert("authorization", header.parse().unwrap());
        }
        ApiKeys::load(file).unwrap().check(&metadata)
    }

    #[test]
    fn a_call_shows_its_key() {
        let ask = |header: &str| shown(Some(header));
        assert_eq!(ask(&format!("Bearer {TWO}")), Ok("alice".to_owned()));
        assert_eq!(ask(&format!("bearer  {ONE}")), Ok(String::new()));
        assert_eq!(ask(&format!("Bearer {TWO}0")), Err(KeyRefusal::Unknown));
        assert_eq!(ask("Bearer alice"), Err(KeyRefusal::Unknown));
        for missing in [None, Some(TWO), Some("Basic YTpi"), Some("Bearer "), Some("Bearer")] {
            assert_eq!(shown(missing), Err(KeyRefusal::Missing), "{missing:?}");
        }
    }
}

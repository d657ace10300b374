//! Who may connect: files of certificates and keys, as settings of the roles and of the commands that ask them.

use std::path::{Path, PathBuf};

use clap::Args;
use shimmer_proto::tls::TlsFiles;

use super::ConfigError;

/// All three files of a member, or none.
pub(crate) fn member_files(
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
) -> Result<Option<TlsFiles>, ConfigError> {
    match (ca, cert, key) {
        (None, None, None) => Ok(None),
        (Some(ca), Some(cert), Some(key)) => Ok(Some(TlsFiles { ca, cert, key })),
        (ca, cert, key) => {
            let given = [("tls-ca", ca), ("tls-cert", cert), ("tls-key", key)];
            Err(incomplete(&given, "mutual TLS needs all three of tls-ca, tls-cert and tls-key"))
        }
    }
}

/// Certificate and key of the public port, or neither.
pub(super) fn server_files(
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
) -> Result<Option<(PathBuf, PathBuf)>, ConfigError> {
    match (cert, key) {
        (None, None) => Ok(None),
        (Some(cert), Some(key)) => Ok(Some((cert, key))),
        (cert, key) => Err(incomplete(
            &[("api-tls-cert", cert), ("api-tls-key", key)],
            "TLS of the public port needs both api-tls-cert and api-tls-key",
        )),
    }
}

fn incomplete(given: &[(&str, Option<PathBuf>)], rule: &str) -> ConfigError {
    let missing: Vec<&str> =
        given.iter().filter(|(_, file)| file.is_none()).map(|(key, _)| *key).collect();
    let verb = if missing.len() == 1 { "is" } else { "are" };
    let (first, all) = (missing.first().copied().unwrap_or_default(), missing.join(" and "));
    ConfigError::invalid(first, format!("{all} {verb} missing: {rule}, or none"))
}

/// How a client shows who it is, and whom it believes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct Access {
    /// File with the API key, as `key` or `name:key` in its first line; the variable SHIMMER_API_KEY can hold the key itself
    #[arg(long, env = "SHIMMER_API_KEY_FILE", value_name = "FILE", help_heading = "Access")]
    pub api_key_file: Option<PathBuf>,

    /// Certificates of the authorities that may have signed the server's, for https:// endpoints
    #[arg(long, env = "SHIMMER_CA", value_name = "FILE", help_heading = "Access")]
    pub ca: Option<PathBuf>,
}

/// The variable that holds a key. It has no flag: every user of a machine can read the flags of a process.
pub(super) const API_KEY_VARIABLE: &str = "SHIMMER_API_KEY";

impl Access {
    /// The key to show, if there is any: the file goes before the variable.
    ///
    /// # Errors
    /// The file cannot be read or holds no key, or the variable is not text.
    pub fn key(&self) -> Result<Option<String>, ConfigError> {
        if let Some(file) = &self.api_key_file {
            return key_of(file).map(Some);
        }
        of_variable(API_KEY_VARIABLE)
    }
}

/// The variable that holds the token for a source of `fetch`. It has no flag either.
pub(crate) const FETCH_TOKEN_VARIABLE: &str = "SHIMMER_FETCH_TOKEN";

/// The token to show to a source, if there is any: all of the file, which goes before the variable.
///
/// # Errors
/// The file cannot be read or is empty, or the variable is not text.
pub(crate) fn fetch_token(file: Option<&Path>) -> Result<Option<String>, ConfigError> {
    let Some(file) = file else { return of_variable(FETCH_TOKEN_VARIABLE) };
    let refuse =
        |reason: &str| ConfigError::invalid("token-file", format!("{}: {reason}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| refuse(&error.to_string()))?;
    match text.trim() {
        "" => Err(refuse("no token in it")),
        token => Ok(Some(token.to_owned())),
    }
}

fn of_variable(name: &str) -> Result<Option<String>, ConfigError> {
    match std::env::var(name) {
        Ok(key) if key.trim().is_empty() => Ok(None),
        Ok(key) => Ok(Some(key.trim().to_owned())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(ConfigError::invalid(name, error.to_string())),
    }
}

fn key_of(file: &Path) -> Result<String, ConfigError> {
    let refuse = |reason: &str| {
        ConfigError::invalid("api-key-file", format!("{}: {reason}", file.display()))
    };
    let text = std::fs::read_to_string(file).map_err(|error| refuse(&error.to_string()))?;
    let line = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    let line = line.ok_or_else(|| refuse("no key in it"))?;
    let key = line.split_once(':').map_or(line, |(_, key)| key).trim();
    if key.is_empty() {
        return Err(refuse("its first line has a name without a key"));
    }
    Ok(key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_member(given: [bool; 3], expected: Result<bool, &str>) {
        let [ca, cert, key] = given.map(|given| given.then(|| PathBuf::from("f")));
        match (member_files(ca, cert, key), expected) {
            (Ok(files), Ok(complete)) => assert_eq!(files.is_some(), complete),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, expected) => panic!("{given:?} gives {found:?}, not {expected:?}"),
        }
    }

    #[test]
    fn files_come_together_or_not_at_all() {
        check_member([false; 3], Ok(false));
        check_member([true; 3], Ok(true));
        check_member([true, true, false], Err("tls-key: tls-key is missing"));
        check_member([false, true, false], Err("tls-ca: tls-ca and tls-key are missing"));
        let error = server_files(Some("c".into()), None).unwrap_err().to_string();
        assert!(error.contains("api-tls-key is missing"), "{error}");
    }

    #[test]
    fn the_key_is_the_first_line_that_is_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("key");
        let access = Access { api_key_file: Some(file.clone()), ca: None };
        for (text, expected) in [("# mine\n\n secret-1 \nother", "secret-1"), ("me: abc", "abc")] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(access.key().unwrap().as_deref(), Some(expected));
        }
        for (text, expected) in [("# none\n", "no key in it"), ("me:", "a name without a key")] {
            std::fs::write(&file, text).unwrap();
            let error = access.key().unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("api-key-file"), "{error}");
        }
    }
}

//! What two processes must have in common before they exchange work, and the refusal that names what they have not.

use crate::expert::v1::Identity;

/// The first field in which two identities differ.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Mismatch {
    /// Name of the field, for example `container digest`.
    pub field: &'static str,
    /// Names both ends, the field, both values and both builds.
    pub message: String,
}

/// Compares two identities field by field, the protocol version first because it decides what the others mean.
///
/// `side` and `peer` name the two ends in the refusal.
pub fn compare(side: &str, ours: &Identity, peer: &str, theirs: &Identity) -> Result<(), Mismatch> {
    let versions = (ours.protocol_version.to_string(), theirs.protocol_version.to_string());
    let fields = [
        ("protocol version", &versions.0, &versions.1),
        ("math id", &ours.math_id, &theirs.math_id),
        ("container digest", &ours.container_digest, &theirs.container_digest),
        ("numeric class", &ours.numeric_class, &theirs.numeric_class),
    ];
    match fields.into_iter().find(|(_, ours, theirs)| ours != theirs) {
        None => Ok(()),
        Some((field, our_value, their_value)) => {
            let message = format!(
                "{peer} has {field} {}, {side} has {} ({peer} build: {}, {side} build: {})",
                shown(their_value),
                shown(our_value),
                shown(&theirs.build),
                shown(&ours.build),
            );
            Err(Mismatch { field, message })
        }
    }
}

/// A peer's text is untrusted: it is cut and its control characters are escaped before it reaches a log or a terminal.
pub fn shown(text: &str) -> String {
    /// Room for an error with two paths; ten times as much once escaped is still far from the limit of headers.
    const LONGEST: usize = 512;
    if text.is_empty() {
        return "(none)".to_owned();
    }
    let mut clean: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        clean.push_str("...");
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            protocol_version: 1,
            build: "0.1.0".to_owned(),
            math_id: "shimmer-math/1".to_owned(),
            container_digest: "41aa".to_owned(),
            numeric_class: "experts=q8g64/a8g64".to_owned(),
        }
    }

    fn check(change: impl FnOnce(&mut Identity), expected: Option<&str>) {
        let mut theirs = identity();
        change(&mut theirs);
        let found = compare("this coordinator", &identity(), "worker w2", &theirs)
            .err()
            .map(|e| e.to_string());
        match expected {
            None => assert_eq!(found, None),
            Some(text) => {
                assert!(found.as_deref().is_some_and(|f| f.starts_with(text)), "{found:?}")
            }
        }
    }

    #[test]
    fn each_field_is_refused_by_name() {
        check(|_| (), None);
        check(|i| i.build = "other".to_owned(), None);
        check(
            |i| i.protocol_version = 2,
            Some("worker w2 has protocol version 2, this coordinator has 1"),
        );
        check(
            |i| i.math_id = "x/2".to_owned(),
            Some("worker w2 has math id x/2, this coordinator has shimmer-math/1"),
        );
        check(
            |i| i.container_digest = "9f3c".to_owned(),
            Some("worker w2 has container digest 9f3c, this coordinator has 41aa"),
        );
        check(
            |i| i.numeric_class.clear(),
            Some("worker w2 has numeric class (none), this coordinator has experts=q8g64/a8g64"),
        );
    }

    #[test]
    fn a_peers_text_is_cleaned() {
        assert_eq!(shown("a\x1b[31mb\n"), "a\\u{1b}[31mb\\n");
        assert_eq!(shown(&"x".repeat(1000)).len(), 515);
    }
}

//! `--print-config`: the effective settings as TOML, each with its origin and the reason of its default.

use std::fmt::Write as _;

use super::{Origin, Resolved, Settings, present};

/// Renders the effective settings. The text is itself a valid config file.
pub fn render<S: Settings>(resolved: &Resolved<S>) -> String {
    let values =
        present(&resolved.settings).expect("every layer was written as TOML when it was resolved");
    let mut text = String::new();
    for (key, origin) in S::KEYS.iter().zip(&resolved.origins) {
        let name = key.field.replace('_', "-");
        let origin = match origin {
            Origin::Absent => "not set",
            Origin::Default => "default",
            Origin::File => "from the config file",
            Origin::Environment => "from the environment",
            Origin::Flag => "from a flag",
        };
        let line = match values.get(&name) {
            Some(value) => format!("{name} = {value}"),
            None => format!("# {name} ="),
        };
        writeln!(text, "# {origin}: {}\n{line}\n", key.reason).expect("a String takes any text");
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

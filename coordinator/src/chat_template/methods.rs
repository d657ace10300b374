//! Methods of Python's strings, lists and dictionaries that templates call.
//!
//! Where the renderer's library has a method that behaves like Python's, it is used; here are those that it lacks, and
//! those that treat white space or line ends differently.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::python::{arguments, is_space, items, split, split_lines};

pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => string(state, value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Seq => sequence(state, value, method, args)?,
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn string(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    state.consume_fuel(u64::try_from(text.len() / 64).unwrap_or(u64::MAX))?;
    let result = match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => {
            let [separator, limit] = arguments(args, ["sep", "maxsplit"])?;
            let separator = separator.as_ref().map(text_of).transpose()?;
            if separator == Some("") {
                return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
            }
            let limit = limit.and_then(|limit| limit.as_usize());
            list(split(text, separator, limit, method == "rsplit"))
        }
        "splitlines" => {
            let [keep] = arguments(args, ["keepends"])?;
            list(split_lines(text, keep.is_some_and(|keep| keep.is_true())))
        }
        "isspace" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(is_space))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let from_left = method == "partition";
            let found =
                if from_left { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match found {
                Some((head, tail)) => [head, separator, tail],
                None if from_left => [text, "", ""],
                None => ["", "", text],
            };
            list(parts.to_vec())
        }
        "index" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            let found = if method == "index" { text.find(what) } else { text.rfind(what) };
            let at = found
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
            Value::from(text[..at].chars().count())
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['-', '+'])));
            let zeros = padding(state, text, width)?;
            Value::from(format!("{sign}{}{digits}", "0".repeat(zeros)))
        }
        "ljust" | "rjust" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let fill = fill.unwrap_or(" ").repeat(padding(state, text, width)?);
            Value::from(if method == "ljust" {
                format!("{text}{fill}")
            } else {
                format!("{fill}{text}")
            })
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        _ => return Ok(None),
    };
    Ok(Some(result))
}

fn sequence(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    match method {
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            match items(state, value)?.iter().position(|item| item == what) {
                Some(at) => Ok(Some(Value::from(at))),
                None => Err(Error::new(ErrorKind::InvalidOperation, "value is not in the list")),
            }
        }
        "copy" => {
            let () = from_args(args)?;
            Ok(Some(value.clone()))
        }
        _ => Ok(None),
    }
}

fn text_of(value: &Value) -> Result<&str, Error> {
    value
        .as_str()
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the argument must be a string"))
}

fn list(parts: Vec<&str>) -> Value {
    Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>())
}

/// `str.strip` and its two halves.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let drops = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(drops) } else { text };
    if right { text.trim_end_matches(drops) } else { text }
}

/// How many characters are missing to `width`, paid for in advance.
fn padding(state: &State<'_, '_>, text: &str, width: usize) -> Result<usize, Error> {
    let missing = width.saturating_sub(text.chars().count());
    state.consume_fuel(u64::try_from(missing / 16).unwrap_or(u64::MAX))?;
    Ok(missing)
}

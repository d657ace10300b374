//! Small pieces of Python's behaviour that templates rely on.

/// Whether `str.isspace` holds: Unicode white space and the four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Whether `str.splitlines` breaks here.
fn is_line_break(c: char) -> bool {
    matches!(
        c,
        '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// `str.splitlines`.
pub(super) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_line_break).unwrap_or(rest.len());
        let width = if rest[end..].starts_with("\r\n") {
            2
        } else {
            rest[end..].chars().next().map_or(0, char::len_utf8)
        };
        lines.push(&rest[..if keep_ends { end + width } else { end }]);
        rest = &rest[end + width..];
    }
    lines
}

/// `str.split` and `str.rsplit`; no separator means runs of white space.
pub(super) fn split<'a>(
    text: &'a str,
    separator: Option<&str>,
    limit: Option<usize>,
    from_right: bool,
) -> Vec<&'a str> {
    let limit = limit.unwrap_or(usize::MAX);
    let mut parts = Vec::new();
    match (separator, from_right) {
        (Some(separator), false) => {
            return text.splitn(limit.saturating_add(1), separator).collect();
        }
        (Some(separator), true) => parts.extend(text.rsplitn(limit.saturating_add(1), separator)),
        (None, false) => {
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                if parts.len() == limit {
                    parts.push(rest);
                    break;
                }
                let end = rest.find(is_space).unwrap_or(rest.len());
                parts.push(&rest[..end]);
                rest = rest[end..].trim_start_matches(is_space);
            }
            return parts;
        }
        (None, true) => {
            let mut rest = text.trim_end_matches(is_space);
            while !rest.is_empty() {
                if parts.len() == limit {
                    parts.push(rest);
                    break;
                }
                let start = rest
                    .rfind(is_space)
                    .map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end_matches(is_space);
            }
        }
    }
    parts.reverse();
    parts
}

/// `repr` of a finite float: the shortest digits, an exponent from 1e16 upwards and below 1e-4.
pub(super) fn float_repr(number: f64) -> String {
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = number.to_string();
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

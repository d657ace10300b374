//! Changes a template's source where the renderer's grammar differs from the one that transformers uses.
//!
//! - Line ends become `\n`, as Jinja has them in text and in string literals.
//! - `{% generation %}` blocks (marks for training, no effect on the text) become blocks with a scope of their own.

/// Prepares a template's source for compilation.
pub(super) fn prepare(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = if rest.starts_with("{#") {
            rest.find("#}").map_or(rest.len(), |end| end + 2)
        } else if rest.starts_with("{{") {
            end_of_code(rest, "}}")
        } else if rest.starts_with("{%") {
            end_of_code(rest, "%}")
        } else {
            1
        };
        let (code, after) = rest.split_at(length);
        rest = after;
        match tag(code) {
            Some((start, "generation")) => replace_tag(&mut out, code, start, "generation", "with"),
            Some((start, "endgeneration")) => {
                replace_tag(&mut out, code, start, "endgeneration", "endwith")
            }
            Some((_, "raw")) => {
                out.push_str(code);
                let length = end_of_raw(rest);
                out.push_str(&rest[..length]);
                rest = &rest[length..];
            }
            _ => out.push_str(code),
        }
    }
    out.push_str(rest);
    out
}

/// Length of a block or expression up to its closing delimiter, which does not count inside string literals.
fn end_of_code(code: &str, close: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in code.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '\'' || c == '"' => quote = Some(c),
            None if code[at..].starts_with(close) => return at + close.len(),
            None => {}
        }
    }
    code.len()
}

/// The first word of a block tag and where it starts.
fn tag(code: &str) -> Option<(usize, &str)> {
    let inner = code.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start();
    let start = code.len() - inner.len();
    let length = inner.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(inner.len());
    Some((start, &inner[..length]))
}

fn replace_tag(out: &mut String, code: &str, start: usize, from: &str, to: &str) {
    out.push_str(&code[..start]);
    out.push_str(to);
    out.push_str(&code[start + from.len()..]);
}

/// Where the block tag begins that ends a raw block.
fn end_of_raw(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%") {
        if tag(&text[from + at..]).is_some_and(|(_, word)| word == "endraw") {
            return from + at;
        }
        from += at + 2;
    }
    text.len()
}

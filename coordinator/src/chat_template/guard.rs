//! Keeps control markers inside messages from becoming control tokens.
//!
//! The template is free to cut, trim and move the text of a message, so the places of a message's own markers in the
//! rendered prompt are found by rendering twice: once as it is, once with two marks, which occur nowhere else, around
//! each marker of the request. Where both renders agree but for the marks and blanks, every marker of the prompt is
//! known to come from the template or from the request. A template may look for markers at the very beginning or end
//! of a message, where a mark is in the way; so one mark alone is tried next. If the renders never agree, the
//! request's markers are replaced by words that mean nothing before rendering, and put back as text afterwards: then
//! the template cannot act on them, but nothing can be forged.

use std::collections::HashMap;
use std::ops::Range;

use super::values::Inputs;
use super::{ChatTemplate, TextError};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Where marks are put around a marker: before it, after it.
const MARKINGS: [(bool, bool); 3] = [(true, true), (false, true), (true, false)];

pub(super) fn encode_chat(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    inputs: &Inputs,
) -> Result<(Vec<u32>, String), TextError> {
    let text = template.render_inputs(inputs)?;
    let markers: Vec<&str> = tokenizer.control_markers().collect();
    let suspicious = |part: &str| {
        !tokenizer.control_occurrences(part).is_empty() || touches(part, &markers) != (false, false)
    };
    if !inputs.any_string(&mut |part| suspicious(part)) {
        let ids =
            tokenizer.encode(&text, EncodeOptions { add_special: false, parse_special: true })?;
        return Ok((ids, text));
    }
    let marks = Marks::choose(template, inputs);
    for (before, after) in MARKINGS {
        let marked =
            inputs.map_strings(&mut |part| marks.wrap(part, tokenizer, &markers, before, after));
        let Ok(marked) = template.render_inputs(&marked) else { continue };
        if let Some(starts) = marks.template_markers(tokenizer, &text, &marked) {
            return Ok((tokenizer.encode_marked(&text, &starts)?, text));
        }
    }
    opaque(template, tokenizer, inputs, &markers)
}

/// Whether a string begins with the end of a marker, or ends with the beginning of one: next to the template's text or
/// another string it could complete a marker.
fn touches(part: &str, markers: &[&str]) -> (bool, bool) {
    let cuts = |marker: &'_ str| {
        (1..marker.len()).filter(|at| marker.is_char_boundary(*at)).collect::<Vec<_>>()
    };
    let at_start = |marker: &&str| cuts(marker).iter().any(|at| part.starts_with(&marker[*at..]));
    let at_end = |marker: &&str| cuts(marker).iter().any(|at| part.ends_with(&marker[..*at]));
    (markers.iter().any(at_start), markers.iter().any(at_end))
}

/// Two characters that occur neither in the request nor in the template.
struct Marks {
    open: char,
    close: char,
}

impl Marks {
    fn choose(template: &ChatTemplate, inputs: &Inputs) -> Self {
        let free = |c: &char| {
            !template.sources.contains(*c) && !inputs.any_string(&mut |part| part.contains(*c))
        };
        // A request long enough to contain all of them is longer than any that is accepted: the plane holds 65,534
        // characters, and each is looked for in turn.
        let mut candidates = ('\u{f0000}'..='\u{ffffd}').filter(free);
        let open = candidates.next().unwrap_or('\u{f0000}');
        let close = candidates.next().unwrap_or('\u{f0001}');
        Self { open, close }
    }

    fn is_mark(&self, c: char) -> bool {
        c == self.open || c == self.close
    }

    fn wrap(
        &self,
        part: &str,
        tokenizer: &Tokenizer,
        markers: &[&str],
        before: bool,
        after: bool,
    ) -> String {
        let (at_start, at_end) = touches(part, markers);
        let mut out = String::with_capacity(part.len() + 16);
        if at_start {
            out.push(self.close);
        }
        let mut done = 0;
        for marker in tokenizer.control_occurrences(part) {
            out.push_str(&part[done..marker.start]);
            if before {
                out.push(self.open);
            }
            out.push_str(&part[marker.clone()]);
            if after {
                out.push(self.close);
            }
            done = marker.end;
        }
        out.push_str(&part[done..]);
        if at_end {
            out.push(self.open);
        }
        out
    }

    /// Where the template's own markers start in `text`, or `None` when the marked render is another text.
    fn template_markers(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        marked: &str,
    ) -> Option<Vec<usize>> {
        let counts = |c: char| !c.is_whitespace() && !self.is_mark(c);
        if !text.chars().filter(|c| counts(*c)).eq(marked.chars().filter(|c| counts(*c))) {
            return None;
        }
        let own: HashMap<usize, &str> =
            places(marked, &tokenizer.control_occurrences(marked), counts)
                .filter(|(range, _)| {
                    !marked[..range.start].ends_with(self.open)
                        && !marked[range.end..].starts_with(self.close)
                })
                .map(|(range, place)| (place, &marked[range]))
                .collect();
        let occurrences = tokenizer.control_occurrences(text);
        let starts = places(text, &occurrences, counts)
            .filter(|(range, place)| {
                own.get(place).is_some_and(|marker| *marker == &text[range.clone()])
            })
            .map(|(range, _)| range.start)
            .collect();
        Some(starts)
    }
}

/// Each range with the number of counted characters before it, which is the same in both renders.
fn places(
    text: &str,
    ranges: &[Range<usize>],
    counts: impl Fn(char) -> bool,
) -> impl Iterator<Item = (Range<usize>, usize)> {
    let (mut done, mut place) = (0, 0);
    ranges.iter().map(move |range| {
        place += text[done..range.start].chars().filter(|c| counts(*c)).count();
        done = range.start;
        (range.clone(), place)
    })
}

/// Renders with words in place of the request's markers and puts the markers back as text.
fn opaque(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    inputs: &Inputs,
    markers: &[&str],
) -> Result<(Vec<u32>, String), TextError> {
    let word = unused_word(template, inputs, markers);
    let mut replaced: Vec<String> = Vec::new();
    let hidden = inputs.map_strings(&mut |part| {
        let (at_start, at_end) = touches(part, markers);
        let mut out = String::with_capacity(part.len() + 16);
        let mut hide = |marker: &str, out: &mut String| {
            out.push_str(&format!("{word}{:08x}", replaced.len()));
            replaced.push(marker.to_owned());
        };
        if at_start {
            hide("", &mut out);
        }
        let mut done = 0;
        for marker in tokenizer.control_occurrences(part) {
            out.push_str(&part[done..marker.start]);
            hide(&part[marker.clone()], &mut out);
            done = marker.end;
        }
        out.push_str(&part[done..]);
        if at_end {
            hide("", &mut out);
        }
        out
    });
    let hidden = template.render_inputs(&hidden)?;
    let mut own =
        tokenizer.control_occurrences(&hidden).into_iter().map(|range| range.start).peekable();
    let mut text = String::with_capacity(hidden.len());
    let mut starts = Vec::new();
    let mut at = 0;
    loop {
        let next = hidden[at..].find(&word).map(|found| at + found);
        let end = next.unwrap_or(hidden.len());
        while let Some(start) = own.next_if(|start| *start < end) {
            starts.push(text.len() + start - at);
        }
        text.push_str(&hidden[at..end]);
        let Some(found) = next else { break };
        let digits = found + word.len();
        let index = hidden
            .get(digits..digits + 8)
            .and_then(|digits| usize::from_str_radix(digits, 16).ok());
        text.push_str(index.and_then(|index| replaced.get(index)).map_or("", String::as_str));
        at = (digits + 8).min(hidden.len());
    }
    Ok((tokenizer.encode_marked(&text, &starts)?, text))
}

/// A word of ASCII letters that occurs nowhere, so that it survives whatever the template does to text.
fn unused_word(template: &ChatTemplate, inputs: &Inputs, markers: &[&str]) -> String {
    let mut word = "zq".to_owned();
    while template.sources.contains(&word)
        || markers.iter().any(|marker| marker.contains(&word))
        || inputs.any_string(&mut |part| part.contains(&word))
    {
        word.push('q');
    }
    word
}

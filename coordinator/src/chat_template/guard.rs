//! Keeps control markers inside messages from becoming control tokens.
//!
//! The template is free to cut, trim and move the text of a message, so the places of a message's own markers in the
//! rendered prompt are found by rendering twice: once as it is, once with two marks, which occur nowhere else, around
//! each marker of the request. Where both renders agree but for the marks and blanks, every marker of the prompt is
//! known to come from the template or from the request. A template may look for markers at the very beginning or end
//! of a message, where a mark is in the way; so one mark alone is tried next. If the renders never agree, the
//! request's markers are replaced by words that mean nothing before rendering, and put back as text afterwards: then
//! the template cannot act on them, but nothing can be forged.
//!
//! A marker that the template itself builds is the template's, even around a name from the request
//! (`'<|' + role + '|>'`) or by deleting letters inside a message, which no known template does.

use std::collections::HashMap;
use std::ops::Range;

use super::values::{Inputs, Part};
use super::{ChatTemplate, TextError};
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Where marks are put around a marker: before it, after it.
const MARKINGS: [(bool, bool); 3] = [(true, true), (false, true), (true, false)];

pub(super) fn encode_chat(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    inputs: &Inputs,
) -> Result<(Vec<u32>, String), TextError> {
    let rendered = template.render_inputs(inputs)?;
    let edges = Edges::new(tokenizer);
    let suspicious = |text: &str, part: Part| {
        tokenizer.has_control_marker(text) || edges.of(text, part) != (false, false)
    };
    if !inputs.any_string(&mut |text, part| suspicious(text, part)) {
        let ids = tokenizer
            .encode(&rendered, EncodeOptions { add_special: false, parse_special: true })?;
        return Ok((ids, rendered));
    }
    let marks = Marks::choose(template, inputs);
    for marking in MARKINGS {
        let marked = inputs.map_strings(&mut |text, part| {
            marks.wrap(text, tokenizer, edges.of(text, part), marking)
        });
        let Ok(marked) = template.render_inputs(&marked) else { continue };
        if let Some(starts) = marks.template_markers(tokenizer, &rendered, &marked, marking) {
            return Ok((tokenizer.encode_marked(&rendered, &starts)?, rendered));
        }
    }
    opaque(template, tokenizer, inputs, &edges)
}

/// The beginnings and the ends of control markers.
struct Edges<'a> {
    markers: Vec<&'a str>,
}

impl<'a> Edges<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { markers: tokenizer.control_markers().collect() }
    }

    /// Whether a text begins with the end of a marker, and whether it ends with the beginning of one: beside another
    /// text it could complete a marker.
    fn of(&self, text: &str, part: Part) -> (bool, bool) {
        if part == Part::Data {
            return (false, false);
        }
        let any = |test: &dyn Fn(&str, usize) -> bool| {
            let inside = |marker: &str, at: usize| marker.is_char_boundary(at) && test(marker, at);
            self.markers.iter().any(|marker| (1..marker.len()).any(|at| inside(marker, at)))
        };
        let at_start = any(&|marker, at| text.starts_with(&marker[at..]));
        let at_end = any(&|marker, at| text.ends_with(&marker[..at]));
        (at_start, at_end)
    }
}

/// Characters that occur neither in the request nor in the template.
struct Marks {
    open: char,
    close: char,
    /// Keeps two texts apart that could make a marker together.
    edge: char,
}

impl Marks {
    fn choose(template: &ChatTemplate, inputs: &Inputs) -> Self {
        let free = |c: &char| {
            !template.sources.contains(*c) && !inputs.any_string(&mut |text, _| text.contains(*c))
        };
        // Private-use characters. A request that contains all 65,534 of them gets the first three all the same:
        // its renders then differ, or its markers count as text.
        let mut candidates = ('\u{f0000}'..='\u{ffffd}').filter(free);
        let mut next = |otherwise: char| candidates.next().unwrap_or(otherwise);
        Self { open: next('\u{f0000}'), close: next('\u{f0001}'), edge: next('\u{f0002}') }
    }

    fn is_mark(&self, c: char) -> bool {
        [self.open, self.close, self.edge].contains(&c)
    }

    fn wrap(
        &self,
        text: &str,
        tokenizer: &Tokenizer,
        (at_start, at_end): (bool, bool),
        (before, after): (bool, bool),
    ) -> String {
        let mut out = String::with_capacity(text.len() + 16);
        if at_start {
            out.push(self.edge);
        }
        let mut done = 0;
        for marker in tokenizer.control_occurrences(text) {
            out.push_str(&text[done..marker.start]);
            if before {
                out.push(self.open);
            }
            out.push_str(&text[marker.clone()]);
            if after {
                out.push(self.close);
            }
            done = marker.end;
        }
        out.push_str(&text[done..]);
        if at_end {
            out.push(self.edge);
        }
        out
    }

    /// Where the template's own markers start in `rendered`, or `None` when the marked render is another text.
    ///
    /// A marker is the request's when it still has all its marks. A template that splits a message at a marker leaves
    /// single marks behind, perhaps beside a marker that it writes itself.
    fn template_markers(
        &self,
        tokenizer: &Tokenizer,
        rendered: &str,
        marked: &str,
        (before, after): (bool, bool),
    ) -> Option<Vec<usize>> {
        let counts = |c: char| !c.is_whitespace() && !self.is_mark(c);
        if !rendered.chars().filter(|c| counts(*c)).eq(marked.chars().filter(|c| counts(*c))) {
            return None;
        }
        let is_own = |range: &Range<usize>| {
            let opened = !before || marked[..range.start].ends_with(self.open);
            let closed = !after || marked[range.end..].starts_with(self.close);
            !(opened && closed)
        };
        let own: HashMap<usize, &str> =
            places(marked, &tokenizer.control_occurrences(marked), counts)
                .filter(|(range, _)| is_own(range))
                .map(|(range, place)| (place, &marked[range]))
                .collect();
        let starts = places(rendered, &tokenizer.control_occurrences(rendered), counts)
            .filter(|(range, place)| {
                own.get(place).is_some_and(|marker| *marker == &rendered[range.clone()])
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
    edges: &Edges<'_>,
) -> Result<(Vec<u32>, String), TextError> {
    let mut words = Words { word: unused_word(template, inputs, edges), meanings: Vec::new() };
    let hidden = inputs.map_strings(&mut |text, part| {
        let (at_start, at_end) = edges.of(text, part);
        let mut out = String::with_capacity(text.len() + 16);
        if at_start {
            words.push("", &mut out);
        }
        let mut done = 0;
        for marker in tokenizer.control_occurrences(text) {
            out.push_str(&text[done..marker.start]);
            words.push(&text[marker.clone()], &mut out);
            done = marker.end;
        }
        out.push_str(&text[done..]);
        if at_end {
            words.push("", &mut out);
        }
        out
    });
    let hidden = template.render_inputs(&hidden)?;
    let (text, starts) = words.replace(&hidden, &tokenizer.control_occurrences(&hidden));
    Ok((tokenizer.encode_marked(&text, &starts)?, text))
}

/// Words that stand for markers: a word that occurs nowhere else, and eight digits.
struct Words {
    word: String,
    meanings: Vec<String>,
}

impl Words {
    fn push(&mut self, meaning: &str, out: &mut String) {
        out.push_str(&format!("{}{:08x}", self.word, self.meanings.len()));
        self.meanings.push(meaning.to_owned());
    }

    /// Puts the meanings back. `own` are the markers of `hidden`; returns where they start in the result.
    fn replace(&self, hidden: &str, own: &[Range<usize>]) -> (String, Vec<usize>) {
        let mut own = own.iter().map(|range| range.start).peekable();
        let mut text = String::with_capacity(hidden.len());
        let mut starts = Vec::new();
        let mut at = 0;
        loop {
            let next = hidden[at..].find(&self.word).map(|found| at + found);
            let end = next.unwrap_or(hidden.len());
            while let Some(start) = own.next_if(|start| *start < end) {
                starts.push(text.len() + start - at);
            }
            text.push_str(&hidden[at..end]);
            let Some(found) = next else { break };
            let digits = found + self.word.len();
            let index = hidden
                .get(digits..digits + 8)
                .and_then(|digits| usize::from_str_radix(digits, 16).ok());
            match index.and_then(|index| self.meanings.get(index)) {
                Some(meaning) => {
                    text.push_str(meaning);
                    at = digits + 8;
                }
                // The template cut the word up; what is left of it is text.
                None => {
                    text.push_str(&self.word);
                    at = digits;
                }
            }
        }
        (text, starts)
    }
}

/// A word of ASCII letters that occurs nowhere, so that it survives whatever the template does to text.
fn unused_word(template: &ChatTemplate, inputs: &Inputs, edges: &Edges<'_>) -> String {
    let mut word = "zq".to_owned();
    while template.sources.contains(&word)
        || edges.markers.iter().any(|marker| marker.contains(&word))
        || inputs.any_string(&mut |text, _| text.contains(&word))
    {
        word.push('q');
    }
    word
}

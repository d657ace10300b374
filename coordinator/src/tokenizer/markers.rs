//! Added tokens, and how they are found in text.
//!
//! The tokenizer library recognises added tokens everywhere or nowhere. A chat needs both in one text: the template's
//! own control tokens are tokens, the same letters inside a message are text (T8). So the search is repeated here with
//! a choice per place, exactly as the library does it: leftmost, longest, first over the raw text for tokens that are
//! not normalized, then over each normalized piece for those that are.

use std::collections::HashMap;
use std::ops::Range;

/// One added token.
#[derive(Debug, Clone)]
pub(crate) struct AddedToken {
    pub(crate) id: u32,
    pub(crate) content: String,
    /// What is searched for: the content, or its normalized form.
    pub(crate) pattern: String,
    pub(crate) special: bool,
    pub(crate) normalized: bool,
    pub(crate) single_word: bool,
    pub(crate) lstrip: bool,
    pub(crate) rstrip: bool,
}

impl AddedToken {
    /// Whether the token is a control marker, which may be forged. Added tokens of nothing but blanks are not: they
    /// are a way to write indentation (GPT-NeoX), so they are recognised in any text.
    pub(crate) fn is_control(&self) -> bool {
        self.special || self.content.chars().any(|c| !c.is_whitespace())
    }
}

/// A trie over the patterns of some added tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trie {
    /// Children of each node, keyed by node and byte.
    edges: HashMap<(u32, u8), u32>,
    /// Index of the token that ends at a node.
    ends: Vec<Option<usize>>,
}

impl Trie {
    pub(crate) fn new<'a>(patterns: impl Iterator<Item = (usize, &'a str)>) -> Self {
        let mut trie = Self { edges: HashMap::new(), ends: vec![None] };
        for (token, pattern) in patterns {
            if pattern.is_empty() {
                continue;
            }
            let mut node = 0;
            for byte in pattern.bytes() {
                let fresh = u32::try_from(trie.ends.len())
                    .expect("the file that holds the patterns is below 4 GiB");
                node = *trie.edges.entry((node, byte)).or_insert(fresh);
                if node == fresh {
                    trie.ends.push(None);
                }
            }
            let slot = usize::try_from(node).expect("u32 fits in usize");
            trie.ends[slot] = Some(token);
        }
        trie
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.edges.is_empty()
    }

    /// The longest pattern that starts at byte `at`: its token and its end.
    pub(crate) fn longest_at(&self, text: &[u8], at: usize) -> Option<(usize, usize)> {
        let mut node = 0;
        let mut best = None;
        for (offset, byte) in text[at..].iter().enumerate() {
            let Some(next) = self.edges.get(&(node, *byte)) else { break };
            node = *next;
            if let Some(token) = self.ends[usize::try_from(node).expect("u32 fits in usize")] {
                best = Some((token, at + offset + 1));
            }
        }
        best
    }

    /// Leftmost-longest occurrences that do not overlap.
    pub(crate) fn occurrences(&self, text: &str) -> Vec<(usize, Range<usize>)> {
        let mut found = Vec::new();
        let mut at = 0;
        while !self.is_empty() && at < text.len() {
            match self.longest_at(text.as_bytes(), at) {
                Some((token, end)) => {
                    found.push((token, at..end));
                    at = end;
                }
                None => at += 1,
            }
        }
        found
    }
}

/// A stretch of a searched text: an added token, or the text between two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) token: Option<usize>,
    pub(crate) range: Range<usize>,
}

/// Splits `text` at the added tokens that `trie` finds and `allowed` admits, and covers all of it.
///
/// `allowed` sees the token and its place. A token that is not admitted is text, and a shorter one inside it is found.
pub(crate) fn split(
    text: &str,
    trie: &Trie,
    tokens: &[AddedToken],
    mut allowed: impl FnMut(usize, Range<usize>) -> bool,
) -> Vec<Stretch> {
    let mut stretches = Vec::new();
    let mut done = 0;
    let mut at = 0;
    while !trie.is_empty() && at < text.len() {
        let Some((token, end)) = trie.longest_at(text.as_bytes(), at) else {
            at += 1;
            continue;
        };
        if !allowed(token, at..end) {
            at += 1;
            continue;
        }
        let added = &tokens[token];
        if added.single_word && !stands_alone(text, at..end) {
            at = end;
            continue;
        }
        let (mut start, mut stop) = (at, end);
        if added.lstrip {
            start = text[..start].trim_end().len().max(done);
        }
        if added.rstrip {
            stop += text[stop..].len() - text[stop..].trim_start().len();
        }
        if done < start {
            stretches.push(Stretch { token: None, range: done..start });
        }
        stretches.push(Stretch { token: Some(token), range: start..stop });
        done = stop;
        at = stop;
    }
    if done < text.len() {
        stretches.push(Stretch { token: None, range: done..text.len() });
    }
    stretches
}

fn stands_alone(text: &str, range: Range<usize>) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    !text[..range.start].chars().next_back().is_some_and(word)
        && !text[range.end..].chars().next().is_some_and(word)
}

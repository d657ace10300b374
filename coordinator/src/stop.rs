//! Stop strings over a stream of text.
//!
//! Text is held back only while it may still become a stop string, and then exactly the longest tail that may (T13,
//! T14). The stop string that is complete first wins; of those that end at the same place, the longest. So a generation
//! ends at the first character at which it can, and what a client sees does not depend on how the text was cut into
//! chunks.

#[cfg(test)]
mod tests;

/// What a chunk of text led to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopStep {
    /// Text that is certainly not part of a stop string; may be empty.
    pub emit: String,
    /// The stop string that ended the stream. What follows it is dropped.
    pub matched: Option<String>,
}

/// Looks for stop strings in a stream of text.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    matched: bool,
}

impl StopMatcher {
    /// Empty stop strings never match.
    #[must_use]
    pub fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, held: String::new(), matched: false }
    }

    /// Takes the next chunk. After a match nothing is emitted any more.
    #[must_use]
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.matched {
            return StopStep::default();
        }
        self.held.push_str(text);
        let Some((start, stop)) = self.earliest() else {
            let keep = self.ambiguous_from();
            let tail = self.held.split_off(keep);
            return StopStep { emit: std::mem::replace(&mut self.held, tail), matched: None };
        };
        self.matched = true;
        self.held.truncate(start);
        StopStep { emit: std::mem::take(&mut self.held), matched: Some(stop) }
    }

    /// Ends the stream and gives out what was held back: it became no stop string.
    #[must_use]
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that ends first, and where it begins.
    fn earliest(&self) -> Option<(usize, String)> {
        let found =
            self.stops.iter().filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop)));
        let (start, stop) = found.min_by_key(|(at, stop)| (at + stop.len(), *at))?;
        Some((start, stop.clone()))
    }

    /// Where the longest tail begins that may still become a stop string.
    fn ambiguous_from(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        let from = self.held.len().saturating_sub(longest);
        let may_grow = |at: &usize| {
            let tail = &self.held[*at..];
            self.stops.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail))
        };
        (from..self.held.len())
            .filter(|at| self.held.is_char_boundary(*at))
            .find(may_grow)
            .unwrap_or(self.held.len())
    }
}

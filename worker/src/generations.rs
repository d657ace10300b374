//! Which assignments a session holds, and which work they admit: values in, values out, so that a simulator can ask the same
//! questions as [`ExpertSession`](crate::ExpertSession).
//!
//! A session holds at most two assignments, so that work of one generation goes on while the next one is loaded. It is
//! told when the earlier one may go; a third assignment does not wait for that.

use std::fmt;

/// Assignments that one session holds at most.
pub const HELD_MAX: usize = 2;

/// Names an assignment, and orders them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// Which coordinator process, or which of its terms.
    pub epoch: u64,
    /// Placement generation.
    pub generation: u64,
}

impl Stamp {
    /// A stamp of these numbers.
    pub fn new(epoch: u64, generation: u64) -> Self {
        Self { epoch, generation }
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}, generation {}", self.epoch, self.generation)
    }
}

/// The place among the assignments that are ready of the one that admits work with this stamp. Work is admitted by its own
/// generation and by no other, whichever is newer: experts may have moved between them.
pub fn admits(ready: impl IntoIterator<Item = Stamp>, work: Stamp) -> Option<usize> {
    ready.into_iter().position(|stamp| stamp == work)
}

/// The assignments of one session. `A` is what one stands for; those that are still being loaded have none.
#[derive(Debug)]
pub struct Generations<A> {
    /// In the order in which they came.
    held: Vec<Held<A>>,
    /// Assignments so far; names them, because a stamp may come twice.
    begun: u64,
}

#[derive(Debug)]
struct Held<A> {
    stamp: Stamp,
    number: u64,
    ready: Option<A>,
}

impl<A> Default for Generations<A> {
    fn default() -> Self {
        Self { held: Vec::new(), begun: 0 }
    }
}

impl<A> Generations<A> {
    /// An assignment arrives; it is loaded from now on. The number that names it, and what has to go for it: the assignment
    /// of the same stamp, else, if the session is full, the newer of the two. The older one is what the coordinator serves
    /// by until it says Release, whatever else was ready meanwhile.
    pub fn begin(&mut self, stamp: Stamp) -> (u64, Option<(Stamp, Option<A>)>) {
        let same = self.held.iter().position(|held| held.stamp == stamp);
        let newest = (0..self.held.len()).max_by_key(|&index| self.held[index].stamp);
        let gone = same.or_else(|| newest.filter(|_| self.held.len() >= HELD_MAX));
        let gone = gone.map(|index| self.held.remove(index)).map(|held| (held.stamp, held.ready));
        self.begun += 1;
        let number = self.begun;
        self.held.push(Held { stamp, number, ready: None });
        (number, gone)
    }

    /// An assignment has been loaded. Gives it back if it was given up meanwhile.
    pub fn ready(&mut self, number: u64, assignment: A) -> Result<(), A> {
        match self.held.iter_mut().find(|held| held.number == number) {
            Some(held) => {
                held.ready = Some(assignment);
                Ok(())
            }
            None => Err(assignment),
        }
    }

    /// An assignment could not be loaded. Whether the session still held it.
    pub fn failed(&mut self, number: u64) -> bool {
        let before = self.held.len();
        self.held.retain(|held| held.number != number);
        self.held.len() < before
    }

    /// Whether the session holds an assignment, ready or not.
    pub fn holds(&self, number: u64) -> bool {
        self.held.iter().any(|held| held.number == number)
    }

    /// Ends all assignments before `first`, those that are being loaded as well. What they were.
    pub fn release(&mut self, first: Stamp) -> Vec<(Stamp, Option<A>)> {
        let gone = self.held.extract_if(.., |held| held.stamp < first);
        gone.map(|held| (held.stamp, held.ready)).collect()
    }

    /// The assignment that admits work with this stamp.
    pub fn admitting(&self, work: Stamp) -> Option<&A> {
        self.all().nth(admits(self.stamps(), work)?)
    }

    /// As [`Self::admitting`].
    pub fn admitting_mut(&mut self, work: Stamp) -> Option<&mut A> {
        let index = admits(self.stamps(), work)?;
        self.held.iter_mut().filter_map(|held| held.ready.as_mut()).nth(index)
    }

    /// Stamps of the assignments that are ready, in the order in which they came.
    pub fn stamps(&self) -> impl Iterator<Item = Stamp> {
        self.held.iter().filter(|held| held.ready.is_some()).map(|held| held.stamp)
    }

    /// The assignments that are ready, in the order in which they came.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &A> {
        self.held.iter().filter_map(|held| held.ready.as_ref())
    }
}

#[cfg(test)]
mod tests;

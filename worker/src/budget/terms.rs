//! Everything that takes memory in a process with experts, and what that leaves for them.

use std::fmt;

use super::{Available, BudgetTerm, RamBudget, Size};
use crate::{error::Error, tier_options::RamSetting};

/// What becomes of a term's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Anonymous memory that the process will take.
    Anonymous,
    /// Anonymous memory that it holds already, so that what is available does not contain it.
    Held,
    /// Left to the kernel and to the page cache.
    Reserve,
}

/// One line of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term {
    /// What takes the bytes.
    pub name: &'static str,
    /// How many.
    pub bytes: u64,
    /// Of which kind they are.
    pub kind: Kind,
}

/// The memory of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// Bytes that the process can have beside what it holds.
    pub available: u64,
    /// Which limit says so.
    pub limit: BudgetTerm,
    /// Everything but experts, in a fixed order.
    pub terms: Vec<Term>,
    /// Bytes for experts.
    pub experts: RamBudget,
}

impl Budget {
    /// Takes `terms` off what is available, and of the rest what `ram` says. A setting that does not fit is refused like
    /// one that was computed.
    pub fn new(available: Available, ram: RamSetting, mut terms: Vec<Term>) -> Result<Self, Error> {
        let (bytes, limit) = match (available.smallest(), ram) {
            (Some(smallest), _) => smallest,
            // Nothing can be checked, so the user's word is taken.
            (None, RamSetting::Bytes(requested)) => {
                let experts = RamBudget { bytes: requested, term: BudgetTerm::Setting };
                let available = requested.saturating_add(beside(&terms));
                return Ok(Self { available, limit: BudgetTerm::Setting, terms, experts });
            }
            (None, _) => return Err(Error::UnknownMemory),
        };
        terms.extend(kernel_terms(bytes));
        let needed = beside(&terms);
        let Some(room) = bytes.checked_sub(needed).filter(|room| *room > 0) else {
            let taking = terms.into_iter().filter(|term| term.kind != Kind::Held);
            let largest = taking.max_by_key(|term| term.bytes).expect("the kernel's are there");
            return Err(Error::NoRoom { needed, available: bytes, term: limit, largest });
        };
        let experts = match ram {
            RamSetting::Auto | RamSetting::All => RamBudget { bytes: room, term: limit },
            RamSetting::Bytes(requested) if requested > room => {
                return Err(Error::Budget {
                    requested,
                    available: room,
                    beside: needed,
                    term: limit,
                });
            }
            RamSetting::Bytes(bytes) => RamBudget { bytes, term: BudgetTerm::Setting },
        };
        Ok(Self { available: bytes, limit, terms, experts })
    }

    /// One line for each term.
    pub fn log(&self) {
        for term in &self.terms {
            tracing::info!(name = term.name, size = %Size(term.bytes), "memory beside experts");
        }
        let (available, experts) = (Size(self.available), Size(self.experts.bytes));
        tracing::info!(%available, %experts, limit = %self.experts.term, "memory for experts");
    }

    /// Anonymous bytes of the process when everything is in use and experts take `expert_bytes`.
    pub fn peak(&self, expert_bytes: u64) -> u64 {
        let anonymous = self.terms.iter().filter(|term| term.kind != Kind::Reserve);
        anonymous.map(|term| term.bytes).fold(expert_bytes, u64::saturating_add)
    }

    /// Bytes that nobody may take.
    pub fn kept_free(&self) -> u64 {
        self.terms.iter().filter(|term| term.name == KEPT_FREE).map(|term| term.bytes).sum()
    }

    /// Divides the bytes for experts in proportion to what each worker of the process owns: together they never have
    /// more, and if all of it fits, each worker's part does.
    pub fn shares(&self, owned_bytes: &[u64]) -> Vec<RamBudget> {
        let total = owned_bytes.iter().copied().map(u128::from).sum::<u128>().max(1);
        let share = |&owned: &u64| {
            let bytes = u128::from(self.experts.bytes) * u128::from(owned) / total;
            let bytes = u64::try_from(bytes).expect("a part is no larger than the whole");
            RamBudget { bytes, term: self.experts.term }
        };
        owned_bytes.iter().map(share).collect()
    }
}

/// The term of what nobody may take.
const KEPT_FREE: &str = "kept free";

/// Bytes that are no experts' and that the process does not hold yet.
fn beside(terms: &[Term]) -> u64 {
    let taken = terms.iter().filter(|term| term.kind != Kind::Held);
    taken.map(|term| term.bytes).fold(0, u64::saturating_add)
}

/// What the kernel needs when a process fills `available` bytes.
fn kernel_terms(available: u64) -> [Term; 2] {
    [
        // 8 bytes for each page of 4 KiB, where huge pages are not to be had.
        Term { name: "page tables", bytes: available / 512, kind: Kind::Reserve },
        // A process at its limit to the byte reclaims its own code from memory.
        Term { name: KEPT_FREE, bytes: (available / 32).min(1 << 30), kind: Kind::Reserve },
    ]
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, Size(self.bytes))
    }
}

#[cfg(test)]
mod tests;

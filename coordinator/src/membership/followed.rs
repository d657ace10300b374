//! Which placement of the store a coordinator has taken up last, and what it needs to take up another one.
//!
//! Generations only grow at a coordinator, because its work and its workers' assignments are ordered by them. A store that
//! lost its data, or was restored from a backup, may hold an earlier placement, or another one under a number that was given
//! before. Such a placement is not taken up; instead the coordinator announces which generation it would follow, so that
//! whoever leads writes the next one above it.

use shimmer_proto::membership::records::PlacementRecord;

use super::decided::Decided;

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct Followed {
    record: Option<PlacementRecord>,
    /// The store holds another placement, which is not newer.
    behind: bool,
}

impl Followed {
    /// Looks at what stands in the store. Gives it back if it is newer than what was taken up, to be told of to
    /// [`Self::took`] once it is.
    pub fn news(&mut self, decided: Option<Decided>) -> Option<Decided> {
        self.behind = false;
        let (Some(record), Some(found)) = (&self.record, &decided) else { return decided };
        if found.record.generation > record.generation {
            return decided;
        }
        self.behind = found.record != *record;
        None
    }

    /// Takes down that a placement was taken up.
    pub fn took(&mut self, record: PlacementRecord) {
        self.record = Some(record);
        self.behind = false;
    }

    /// The least generation by which the store's placement is the one that is followed; 0 before the first one.
    pub fn follows(&self) -> u64 {
        self.record.as_ref().map_or(0, |record| record.generation + u64::from(self.behind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Placement;

    fn decided(generation: u64, reason: &str) -> Decided {
        let record = PlacementRecord {
            generation,
            container_digest: String::new(),
            leader: "c".to_owned(),
            leader_revision: 1,
            reason: reason.to_owned(),
            workers: Vec::new(),
            layers: Vec::new(),
        };
        Decided { revision: 1, record, placement: Placement::default() }
    }

    /// Looks at a placement and takes it up if it is news; whether it was, and what is followed then.
    fn look(followed: &mut Followed, found: Option<Decided>) -> (bool, u64) {
        let news = followed.news(found);
        let is_news = news.is_some();
        if let Some(Decided { record, .. }) = news {
            followed.took(record);
        }
        (is_news, followed.follows())
    }

    #[test]
    fn only_newer_placements_are_taken_up_and_others_are_asked_for() {
        let mut followed = Followed::default();
        assert_eq!(look(&mut followed, None), (false, 0));
        assert_eq!(look(&mut followed, Some(decided(4, "first"))), (true, 4));
        assert_eq!(look(&mut followed, Some(decided(4, "first"))), (false, 4));
        assert_eq!(look(&mut followed, None), (false, 4), "an empty store is no other placement");
        let earlier = Some(decided(2, "from a backup"));
        assert_eq!(look(&mut followed, earlier), (false, 5), "the next one must be above 4");
        let same = Some(decided(4, "by a leader that knew nothing"));
        assert_eq!(look(&mut followed, same), (false, 5), "a number that was given before");
        assert_eq!(look(&mut followed, Some(decided(4, "first"))), (false, 4), "it is back");
        assert_eq!(look(&mut followed, Some(decided(5, "above"))), (true, 5));
    }
}

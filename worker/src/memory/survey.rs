//! Where the pages of slots really are.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::PoisonError,
    time::{Duration, Instant},
};

use super::{allocator::SlotAllocator, mapping::Mapping, system::page_bytes};

/// The node of every page is asked for up to this many pages of a mapping; of larger ones, that of one in about 512.
const EACH_PAGE_MAX: usize = 4096;
/// Metrics may be asked for every second; pages move while they are first touched, and hardly ever afterwards.
const SURVEY_AGE_MAX: Duration = Duration::from_secs(60);
/// A survey of hundreds of GiB in small pages takes seconds: it gets at most one part in so many of a thread's time.
const SURVEY_SHARE: u32 = 100;

/// Where pages of slots are, estimated from some of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Survey {
    /// Pages in memory, by node.
    pub pages: BTreeMap<u32, u64>,
    /// Those on a node that was not asked for, and those that a node holds beyond an even share: the system takes another
    /// node when one is full.
    pub off_node_pages: u64,
    /// Bytes that lie in huge pages.
    pub huge_bytes: u64,
}

/// The last survey.
#[derive(Debug)]
pub(super) struct Surveyed {
    at: Instant,
    took: Duration,
    found: Survey,
}

impl SlotAllocator {
    /// Asks how pages are made, and on which nodes they are if it was asked for nodes; says nothing where the system does
    /// not tell. Belongs behind a load and not into a step.
    pub fn survey(&self) -> Survey {
        let wanted = self.shared().options.placement.nodes();
        let mapped = self.shared().mapped();
        let spans = mapped.iter().map(|mapping| {
            let start = mapping.start().addr().get();
            start..start + mapping.bytes()
        });
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let huge_bytes = huge_bytes(&smaps, &spans.collect::<Vec<_>>());
        let mut survey = Survey { huge_bytes, ..Survey::default() };
        if wanted.is_empty() {
            return survey;
        }
        for mapping in mapped {
            let (addresses, step) = sample(&mapping, wanted.len());
            let located = self.shared().system.locate(&addresses).unwrap_or_default();
            let mut pages = BTreeMap::new();
            for node in located.into_iter().filter_map(|node| u32::try_from(node).ok()) {
                *pages.entry(node).or_default() += 1;
            }
            pages.values_mut().for_each(|count| *count *= step as u64);
            survey.off_node_pages += off_node(&pages, wanted);
            for (node, count) in pages {
                *survey.pages.entry(node).or_default() += count;
            }
        }
        survey
    }

    /// A survey that is about a minute old at most; older if surveys take long.
    pub fn recent_survey(&self) -> Survey {
        let mut last = self.shared().surveyed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Surveyed { at, took, found }) = &*last
            && at.elapsed() < SURVEY_AGE_MAX.max(*took * SURVEY_SHARE)
        {
            return found.clone();
        }
        let at = Instant::now();
        let found = self.survey();
        *last = Some(Surveyed { at, took: at.elapsed(), found: found.clone() });
        found
    }
}

/// Bytes in huge pages of the mappings that overlap some span. The kernel may join mappings of ours, so a line counts once.
fn huge_bytes(smaps: &str, spans: &[Range<usize>]) -> u64 {
    let range = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        Some(address(start)?..address(end)?)
    };
    let (mut ours, mut kib) = (false, 0);
    for line in smaps.lines() {
        if let Some(mapped) = range(line) {
            ours = spans.iter().any(|span| span.start < mapped.end && mapped.start < span.end);
        } else if let Some(count) = line.strip_prefix("AnonHugePages:").filter(|_| ours) {
            let count = count.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
            kib += count;
        }
    }
    kib * 1024
}

/// Addresses of some pages, and how many pages each stands for.
fn sample(mapping: &Mapping, nodes: usize) -> (Vec<usize>, usize) {
    let pages = mapping.bytes() / page_bytes();
    let step = if pages <= EACH_PAGE_MAX { 1 } else { sample_step(nodes) };
    let start = mapping.start().addr().get();
    ((0..pages).step_by(step).map(|page| start + page * page_bytes()).collect(), step)
}

/// About a huge page of 512 small ones, and without a common factor with the number of nodes, so that pages which go round
/// the nodes are met on each of them alike, whether they are huge or small.
fn sample_step(nodes: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (513..)
        .find(|step| gcd(*step, nodes) == 1)
        .expect("one more than a multiple has no common factor")
}

/// Pages of a mapping that are not where they should be. What one huge page and chance explain (a sixteenth) is not counted.
fn off_node(pages: &BTreeMap<u32, u64>, wanted: &[u32]) -> u64 {
    let share = pages.values().sum::<u64>() / wanted.len() as u64;
    let most = share + share / 16 + 512;
    let stray = |(node, count): (&u32, &u64)| {
        if wanted.contains(node) { count.saturating_sub(most) } else { *count }
    };
    pages.iter().map(stray).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_meets_every_node() {
        for nodes in 2..=16 {
            let step = sample_step(nodes);
            for pages_in_a_row in [1, 512] {
                let mut met = vec![0_usize; nodes];
                (0..nodes * 512 * 8).for_each(|i| met[i * step / pages_in_a_row % nodes] += 1);
                let (least, most) = (met.iter().min().unwrap(), met.iter().max().unwrap());
                assert!(most - least <= most / 16, "{nodes} nodes, {pages_in_a_row}: {met:?}");
            }
        }
    }

    #[test]
    fn huge_pages_of_slots_are_counted_once() {
        let smaps = "200000-600000 rw-p 00000000 00:00 0 \nRss: 9 kB\nAnonHugePages:      4096 kB\n\
                     600000-800000 rw-p 00000000 00:00 0 \nAnonHugePages:      2048 kB\n";
        let spans = [0x20_0000..0x40_0000, 0x40_0000..0x60_0000];
        assert_eq!(huge_bytes(smaps, &spans), 4 << 20);
        assert_eq!(huge_bytes(smaps, &[]), 0);
        assert_eq!(huge_bytes("", &spans), 0);
    }

    #[test]
    fn pages_beyond_an_even_share_or_on_foreign_nodes_are_off_node() {
        let check = |pages: &[(u32, u64)], wanted: &[u32], expected| {
            assert_eq!(off_node(&pages.iter().copied().collect(), wanted), expected, "{pages:?}");
        };
        check(&[], &[0, 1], 0);
        check(&[(0, 16_100), (1, 15_900)], &[0, 1], 0);
        check(&[(0, 32_000)], &[0, 1], 32_000 - 17_512);
        check(&[(0, 16_000), (1, 16_000), (2, 7)], &[0, 1], 7);
    }
}

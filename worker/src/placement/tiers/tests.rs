use proptest::prelude::*;

use super::*;

fn candidates(layers: u32, experts: u32, bytes: u64) -> Vec<Candidate> {
    let of_layer = |layer| {
        (0..experts).map(move |expert| Candidate {
            id: ExpertId { layer, expert },
            bytes,
            usage: u64::from((layer * 31 + expert * 17) % 101),
        })
    };
    (0..layers).flat_map(of_layer).collect()
}

/// 76 layers of 256 experts of 18.9 MB on six GPUs that hold 9,280 of them, and RAM for 11,001.
#[test]
fn the_six_gpu_host_holds_every_expert() {
    const EXPERT: u64 = 18_874_368;
    const OVERHEAD: u64 = 4096;
    const RESERVE: u64 = 2 << 30;
    let gpu = |experts: u64| Gpu {
        requested: None,
        free: RESERVE + experts * (EXPERT + OVERHEAD) + EXPERT / 2,
        reserve: RESERVE,
        overhead: OVERHEAD,
    };
    let gpus = [1547, 1547, 1547, 1547, 1546, 1546].map(gpu);
    let ram = 11_001 * EXPERT + EXPERT / 3;
    let placed = place(candidates(76, 256, EXPERT), &gpus, ram);
    let in_vram: usize = placed.gpus.iter().map(Vec::len).sum();
    assert_eq!((in_vram, placed.pinned.len(), placed.rest.len()), (9280, 10_176, 0));

    // Were the copies of experts in VRAM counted against the RAM, most of that RAM would lie idle.
    let wrong = ram - in_vram as u64 * EXPERT;
    let placed = place(candidates(76, 256, EXPERT), &gpus, wrong);
    assert_eq!((placed.pinned.len(), placed.rest.len()), (1721, 8455));
}

#[test]
fn the_most_used_come_first_and_ties_go_to_the_lowest() {
    let candidate =
        |layer, expert, usage| Candidate { id: ExpertId { layer, expert }, bytes: 10, usage };
    let all = vec![candidate(1, 0, 5), candidate(0, 2, 5), candidate(0, 1, 5), candidate(2, 0, 9)];
    let gpu = Gpu { requested: Some(25), free: 1000, reserve: 0, overhead: 2 };
    let placed = place(all, &[gpu], 10);
    let ids = |ids: &[(u32, u32)]| {
        ids.iter().map(|&(layer, expert)| ExpertId { layer, expert }).collect::<Vec<_>>()
    };
    assert_eq!(placed.gpus, [ids(&[(2, 0), (0, 1)])]);
    assert_eq!(placed.gpu_bytes, [24]);
    assert_eq!(placed.pinned, ids(&[(0, 2)]));
    assert_eq!(placed.rest, ids(&[(1, 0)]));
}

/// A budget priced at the widest expert would leave half of it unused.
#[test]
fn each_expert_is_priced_at_its_own_size() {
    let candidate =
        |expert, bytes| Candidate { id: ExpertId { layer: 0, expert }, bytes, usage: 0 };
    let all = vec![candidate(0, 80), candidate(1, 40), candidate(2, 80), candidate(3, 40)];
    let placed = place(all, &[], 165);
    assert_eq!(placed.pinned_bytes, 160);
    assert_eq!(placed.pinned.iter().map(|id| id.expert).collect::<Vec<_>>(), [0, 1, 3]);
}

fn any_candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let of_id = prop::collection::btree_map((0u32..4, 0u32..12), (1u64..50, 0u64..4), 0..40);
    of_id.prop_map(|map| {
        map.into_iter()
            .map(|((layer, expert), (bytes, usage))| Candidate {
                id: ExpertId { layer, expert },
                bytes,
                usage,
            })
            .collect()
    })
}

fn any_gpus() -> impl Strategy<Value = Vec<Gpu>> {
    let gpu = (prop::option::of(0u64..400), 0u64..400, 0u64..100, 0u64..5);
    let gpu = gpu.prop_map(|(requested, free, reserve, overhead)| Gpu {
        requested,
        free,
        reserve,
        overhead,
    });
    prop::collection::vec(gpu, 0..4)
}

proptest! {
    #[test]
    fn nothing_is_lost_or_placed_twice_and_budgets_are_kept(
        candidates in any_candidates(), gpus in any_gpus(), pin_bytes in 0u64..800, turn in 0usize..40,
    ) {
        let placed = place(candidates.clone(), &gpus, pin_bytes);
        let mut all: Vec<ExpertId> = placed.gpus.iter().flatten().chain(&placed.pinned).chain(&placed.rest).copied().collect();
        all.sort_unstable();
        prop_assert_eq!(all, candidates.iter().map(|candidate| candidate.id).collect::<Vec<_>>());
        let bytes = |ids: &[ExpertId]| -> u64 {
            candidates.iter().filter(|candidate| ids.contains(&candidate.id)).map(|candidate| candidate.bytes).sum()
        };
        prop_assert!(placed.pinned_bytes <= pin_bytes);
        prop_assert_eq!(bytes(&placed.pinned), placed.pinned_bytes);
        for ((gpu, ids), taken) in gpus.iter().zip(&placed.gpus).zip(&placed.gpu_bytes) {
            prop_assert!(*taken <= gpu.room());
            prop_assert_eq!(bytes(ids) + ids.len() as u64 * gpu.overhead, *taken);
        }
        let mut turned = candidates;
        let middle = turn.min(turned.len());
        turned.rotate_left(middle);
        turned.reverse();
        prop_assert_eq!(place(turned, &gpus, pin_bytes), placed);
    }
}

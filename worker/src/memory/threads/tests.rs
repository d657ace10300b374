use shimmer_kernels::{
    ActivationFormat, ActivationRows, Expert, ExpertLayout, ExpertScratch, Kernels, WeightFormat,
    pack_expert,
};

use super::*;
use crate::memory::topology::{Core, TopologySource};

fn node(id: u32, cores: &[&[u32]]) -> Node {
    Node { id, cores: cores.iter().map(|cpus| Core { cpus: cpus.to_vec() }).collect() }
}

fn machine(nodes: Vec<Node>) -> Topology {
    Topology::new(nodes, TopologySource::Sysfs)
}

/// The mask of the calling thread, as the kernel writes it.
fn own_cpus() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().trim().to_owned()
}

fn check(nodes: Vec<Node>, threads: usize, expected: &[&[u32]]) {
    let placed = ThreadPlacement::decide(NumaSetting::Auto, &machine(nodes), threads);
    assert_eq!(placed.cpus, expected);
}

#[test]
fn threads_alternate_between_nodes_on_physical_cores() {
    let two = || vec![node(0, &[&[0, 4], &[1, 5]]), node(1, &[&[2, 6], &[3, 7]])];
    check(two(), 1, &[&[0, 1]]);
    check(two(), 4, &[&[0, 1], &[2, 3], &[0, 1], &[2, 3]]);
    // More threads than cores use the second hardware threads of that node.
    check(two(), 5, &[&[0, 1, 4, 5], &[2, 3], &[0, 1, 4, 5], &[2, 3], &[0, 1, 4, 5]]);
    // A node that the process may use only in part gets fewer threads.
    let uneven = vec![node(0, &[&[0], &[1], &[2]]), node(1, &[&[3]])];
    check(uneven, 4, &[&[0, 1, 2], &[0, 1, 2], &[0, 1, 2], &[3]]);
}

#[test]
fn one_node_or_off_places_nothing() {
    check(vec![node(0, &[&[0], &[1]])], 2, &[]);
    check(vec![], 2, &[]);
    let two = machine(vec![node(0, &[&[0]]), node(1, &[&[1]])]);
    let off = ThreadPlacement::decide(NumaSetting::Off, &two, 2);
    assert_eq!(off, ThreadPlacement::default());
    let pool = off.start_pool(2, "test").unwrap();
    assert!(pool.broadcast(|_| own_cpus()).iter().all(|cpus| *cpus == own_cpus()));
}

/// The processors of this machine as if each were a node of its own; one is shared by both if there is only one.
fn as_two_nodes() -> Topology {
    let cpus: Vec<u32> = Topology::detect()
        .nodes()
        .iter()
        .flat_map(|node| &node.cores)
        .flat_map(|core| core.cpus.clone())
        .collect();
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    machine(vec![node(0, &[&[first]]), node(1, &[&[last]])])
}

#[test]
fn pool_threads_stay_on_their_node_and_the_caller_stays_as_it_was() {
    let before = own_cpus();
    let machine = as_two_nodes();
    let placed = ThreadPlacement::decide(NumaSetting::Auto, &machine, 4);
    let pool = placed.start_pool(4, "test").unwrap();
    let masks = pool.broadcast(|context| (context.index(), own_cpus()));
    for (index, mask) in masks {
        assert_eq!(mask, machine.nodes()[index % 2].cores[0].cpus[0].to_string());
    }
    assert_eq!(own_cpus(), before);
}

#[test]
fn a_mask_that_the_process_was_started_with_is_kept() {
    let first = as_two_nodes().nodes()[0].cores[0].cpus[0];
    let seen = std::thread::spawn(move || {
        keep_on(&[first]).unwrap();
        let found = Topology::detect();
        let placed = ThreadPlacement::decide(NumaSetting::Auto, &found, 2);
        let masks = placed.start_pool(2, "test").unwrap().broadcast(|_| own_cpus());
        (found.cores(), masks)
    });
    let (cores, masks) = seen.join().unwrap();
    assert_eq!(cores, 1);
    assert!(masks.iter().all(|mask| *mask == first.to_string()), "{masks:?}");
}

/// The row blocks of one expert, cut over the threads of two nodes: the same bytes as on one thread.
#[test]
fn threads_of_two_nodes_give_the_same_bytes() {
    const HIDDEN: usize = 512;
    const WIDTH: usize = 1024;
    let kernels = Kernels::new(None).unwrap();
    let layout = ExpertLayout::new(HIDDEN, WIDTH, WeightFormat::Q8G64).unwrap();
    let mut state = 1_u32;
    let mut values = |count: usize| -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(0x3F80_0000 | (state >> 9)) - 1.5
        };
        (0..count).map(|_| next()).collect()
    };
    let parts = [(); 3].map(|()| values(HIDDEN * WIDTH));
    let mut slab = vec![0; layout.slab_bytes()];
    pack_expert(&layout, &parts[0], &parts[1], &parts[2], &mut slab).unwrap();
    let expert = Expert::from_slab(&layout, &slab).unwrap();
    let mut x = ActivationRows::new();
    x.set(&kernels, ActivationFormat::A8G64, &values(2 * HIDDEN), 2, HIDDEN);
    let run = |pool: &rayon::ThreadPool| {
        let mut out = vec![0.0_f32; 2 * HIDDEN];
        pool.install(|| {
            kernels.expert(&expert, &x, &[0, 1], &mut out, &mut ExpertScratch::default());
        });
        out.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    let expected = run(&ThreadPlacement::default().start_pool(1, "test").unwrap());
    for threads in [2, 3, 8] {
        let placed = ThreadPlacement::decide(NumaSetting::Auto, &as_two_nodes(), threads);
        let pool = placed.start_pool(threads, "test").unwrap();
        for _ in 0..8 {
            assert_eq!(run(&pool), expected, "{threads} threads");
        }
    }
}

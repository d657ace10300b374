//! What becomes of memory and threads on the machine that it runs on, as one JSON object per line.
//!
//! `numa_probe [SCENARIO]`, one of: spread, off, slots, crowded. It allocates with the worker's own code and reports what
//! the kernel says of it: `/proc/self/numa_maps` and `/proc/thread-self/status` know nothing of that code.
//! The tests run it natively, and as the only program of a virtual machine with two nodes (`tests/numa`).

#![allow(clippy::print_stdout, reason = "a tool that prints its result")]

use std::{collections::BTreeMap, fs, sync::Mutex};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use shimmer_worker::{
    memory::{
        MemoryOptions, MemoryPlacement, ReleasedSlot, SlotAllocator, SlotMemory, ThreadPlacement,
        Topology, map_slots,
    },
    tier_options::NumaSetting,
};

const MIB: usize = 1 << 20;

fn main() -> Result<()> {
    let scenario = std::env::args().nth(1).unwrap_or_else(|| "spread".to_owned());
    let setting = if scenario == "off" { NumaSetting::Off } else { NumaSetting::Auto };
    let machine = Machine::new(setting)?;
    let mut report = machine.report();
    report["found"] = match scenario.as_str() {
        "spread" | "off" => machine.touch()?,
        "slots" => machine.map_large_model()?,
        "crowded" => machine.crowd()?,
        other => bail!("no scenario is called {other}"),
    };
    println!("{report}");
    Ok(())
}

/// The worker's decisions on this machine.
struct Machine {
    topology: Topology,
    memory: SlotAllocator,
    pool: rayon::ThreadPool,
}

impl Machine {
    fn new(setting: NumaSetting) -> Result<Self> {
        let topology = Topology::detect();
        let placement = MemoryPlacement::decide(setting, &topology)?;
        let memory = SlotAllocator::new(MemoryOptions {
            placement,
            // A limit on locked memory must not matter.
            lock: true,
            ..MemoryOptions::default()
        });
        let threads = ThreadPlacement::decide(setting, &topology, 2);
        let pool = threads.start_pool(2, "probe")?;
        Ok(Self { topology, memory, pool })
    }

    fn report(&self) -> Value {
        let nodes: Vec<_> = self.topology.nodes().iter().map(|node| node.id).collect();
        json!({
            "source": self.topology.source().to_string(),
            "nodes": nodes,
            "thread_cpus": self.pool.broadcast(|_| own_cpus()),
            "own_cpus": own_cpus(),
        })
    }

    /// Runs on the last thread of the pool, which on two nodes is one of the second node.
    fn on_last_thread<R: Send>(&self, run: impl FnOnce() -> R + Send) -> Result<R> {
        let last = self.pool.current_num_threads() - 1;
        let run = Mutex::new(Some(run));
        let results = self.pool.broadcast(|context| {
            let run = (context.index() == last).then(|| run.lock().ok()?.take()).flatten();
            run.map(|run| run())
        });
        results.into_iter().flatten().next().context("a pool has a last thread")
    }

    /// Slots written by one thread, half of them given back and written again.
    fn touch(&self) -> Result<Value> {
        let (stride, count) = (5 * MIB, 8);
        let mut slots = self.memory.map_slots(stride, count)?;
        let at = slots[0].as_ptr().addr();
        let slots = self.on_last_thread(move || {
            slots.iter_mut().for_each(|slot| slot.fill(1));
            let released: Vec<_> =
                slots.split_off(count / 2).into_iter().map(SlotMemory::release).collect();
            slots.extend(released.into_iter().map(ReleasedSlot::attach));
            let zero = slots[count / 2..].iter().all(|slot| slot.iter().all(|byte| *byte == 0));
            slots.iter_mut().for_each(|slot| slot.fill(2));
            (zero, slots)
        })?;
        ensure!(slots.0, "released memory is zero");
        let (policy, pages) = numa_maps(at)?;
        Ok(json!({
            "bytes": stride * count,
            "policy": policy,
            "pages": pages,
            "survey": self.survey(),
            "memory": self.memory.snapshot(),
        }))
    }

    /// A model of 76 layers with 256 experts, one page of each layer touched.
    fn map_large_model(&self) -> Result<Value> {
        let mut layers = Vec::new();
        for _ in 0..76 {
            let mut slots = self.memory.map_slots(20 * MIB, 256)?;
            slots[0][0] = 1;
            layers.push(slots);
        }
        let maps = fs::read_to_string("/proc/self/maps")?.lines().count();
        let limit = fs::read_to_string("/proc/sys/vm/max_map_count")?;
        Ok(json!({
            "slots": layers.iter().map(Vec::len).sum::<usize>(),
            "mappings": self.memory.snapshot().mappings,
            "mappings_of_the_process": maps,
            "mappings_allowed": limit.trim().parse::<u64>()?,
        }))
    }

    /// As many slots as need both nodes, after one thread has taken most of its own node.
    fn crowd(&self) -> Result<Value> {
        let mut other = map_slots(300 * MIB, 1)?;
        let mut slots = self.memory.map_slots(20 * MIB, 15)?;
        let filled = self.on_last_thread(move || {
            other.iter_mut().for_each(|slot| slot.fill(1));
            slots.iter_mut().for_each(|slot| slot.fill(1));
            (other, slots)
        })?;
        let (policy, pages) = numa_maps(filled.1[0].as_ptr().addr())?;
        Ok(json!({ "policy": policy, "pages": pages, "survey": self.survey() }))
    }

    fn survey(&self) -> Value {
        let survey = self.memory.survey();
        json!({ "pages": survey.pages, "off_node_pages": survey.off_node_pages })
    }
}

/// The processors that the calling thread may run on.
fn own_cpus() -> String {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap_or_default().trim().to_owned()
}

/// Policy and pages by node of the mapping that holds an address; none where the kernel knows no nodes.
fn numa_maps(address: usize) -> Result<(Option<String>, BTreeMap<u32, u64>)> {
    let Ok(maps) = fs::read_to_string("/proc/self/numa_maps") else {
        return Ok((None, BTreeMap::new()));
    };
    let mut found = None;
    for line in maps.lines() {
        let start = line.split(' ').next().context("a mapping has an address")?;
        if usize::from_str_radix(start, 16)? <= address {
            found = Some(line);
        }
    }
    let mut words = found.context("the address is mapped")?.split(' ').skip(1);
    let policy = words.next().map(str::to_owned);
    let mut pages = BTreeMap::new();
    for (node, count) in words.filter_map(|word| word.strip_prefix('N')?.split_once('=')) {
        pages.insert(node.parse()?, count.parse()?);
    }
    Ok((policy, pages))
}

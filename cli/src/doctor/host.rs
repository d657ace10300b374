//! Kernel, processors, memory and clock.

use shimmer_worker::budget::Size;

use super::{ClockFacts, ContainerFacts, Finding, HostFacts, Known, MemoryFacts};

/// Mappings that a busy worker may want: some for each layer and load, and room for the allocator.
const MAPPINGS: u64 = 65_530;
/// Files of connections, logs and a container of a hundred layers with copies.
const FILES: u64 = 1024;
/// Below this a process cannot hold a container's files and its connections.
const FILES_LEAST: u64 = 256;
/// Larger steps of the wall clock while we look are no correction of a time service.
const STEP_MS: u128 = 50;
/// Certificates of today are not valid before this year.
const YEAR_LEAST: i64 = 2025;
/// More than this between two hosts confuses whoever reads their logs side by side.
const OFFSET_SECONDS: f64 = 2.0;

pub(super) fn findings(host: &HostFacts) -> Vec<Finding> {
    let mut findings = vec![match &host.kernel {
        Ok(kernel) => Finding::ok("kernel", format!("Linux {kernel}")),
        Err(why) => Finding::unread("kernel", why),
    }];
    findings.push(match host.isa.as_str() {
        "scalar" => Finding::warn(
            "processor",
            format!("{} processors without AVX2: arithmetic is many times slower", host.cpus),
        )
        .fix("let the virtual machine show the host's processor (QEMU: -cpu host)"),
        isa => Finding::ok("processor", format!("{} processors, kernels use {isa}", host.cpus)),
    });
    findings.push(quota(host));
    findings.push(nodes(host));
    findings.push(open_files(&host.open_files));
    findings
}

fn quota(host: &HostFacts) -> Finding {
    const CHECK: &str = "cpu limit";
    let quota = match &host.quota {
        Ok(Some(quota)) => *quota,
        Ok(None) => return Finding::ok(CHECK, "the control group sets none"),
        Err(why) => return Finding::unread(CHECK, why),
    };
    let throttled = host.throttled.as_ref().copied().unwrap_or(0);
    let found =
        format!("the control group allows {quota:.2} processors, {} are visible", host.cpus);
    #[expect(clippy::cast_precision_loss, reason = "a count of processors")]
    let visible = host.cpus as f64;
    if quota + 0.01 < visible {
        // Threads that stand still for a quota hold up the others of their fork and join.
        return Finding::warn(CHECK, format!("{found}: threads beyond it stand still in turns"))
            .fix(format!("--threads {}", whole(quota)));
    }
    match throttled {
        0 => Finding::ok(CHECK, found),
        periods => Finding::note(CHECK, format!("{found}; it stood still in {periods} periods")),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a positive count of processors"
)]
fn whole(quota: f64) -> u64 {
    (quota.floor() as u64).max(1)
}

fn nodes(host: &HostFacts) -> Finding {
    const CHECK: &str = "numa";
    let found = format!("{} memory nodes, {} cores", host.nodes, host.cores);
    if host.nodes < 2 {
        return Finding::ok(CHECK, found);
    }
    if host.zone_reclaim.as_ref().is_ok_and(|mode| *mode != 0) {
        let text = format!("{found}; the kernel frees a node's page cache before it uses another");
        return Finding::warn(CHECK, text).fix("sysctl -w vm.zone_reclaim_mode=0");
    }
    if host.numa_balancing.as_ref().is_ok_and(|mode| *mode != 0) {
        let text = format!("{found}; the kernel moves pages that a worker has spread on purpose");
        return Finding::note(CHECK, text).fix("sysctl -w kernel.numa_balancing=0");
    }
    Finding::ok(CHECK, found)
}

fn open_files(limit: &Known<Option<u64>>) -> Finding {
    const CHECK: &str = "open files";
    match limit {
        Ok(None) => Finding::ok(CHECK, "no limit"),
        Ok(Some(limit)) if *limit >= FILES => Finding::ok(CHECK, format!("up to {limit}")),
        Ok(Some(limit)) => {
            let found = format!("up to {limit}: too few for many connections or mirrors");
            let finding = if *limit < FILES_LEAST {
                Finding::fail(CHECK, found)
            } else {
                Finding::warn(CHECK, found)
            };
            finding.fix("ulimit -n 65536, or LimitNOFILE=65536 in the unit")
        }
        Err(why) => Finding::unread(CHECK, why),
    }
}

pub(super) fn memory(memory: &MemoryFacts, container: Option<&ContainerFacts>) -> Vec<Finding> {
    let experts = container
        .and_then(|container| container.opened.as_ref().ok())
        .map(|opened| opened.expert_bytes);
    vec![
        available(memory),
        locked(&memory.lock_limit, experts),
        mappings(&memory.max_map_count),
        huge(&memory.huge_pages),
        reserved(memory),
        swap(memory),
    ]
}

fn available(memory: &MemoryFacts) -> Finding {
    const CHECK: &str = "memory";
    match memory.available.smallest() {
        Some((bytes, limit)) => {
            Finding::ok(CHECK, format!("{} can be had, says {limit}", Size(bytes)))
        }
        None => Finding::warn(CHECK, "neither the host nor a control group says how much there is")
            .fix("mount /proc into the container, or give workers --ram SIZE"),
    }
}

fn locked(limit: &Known<Option<u64>>, experts: Option<u64>) -> Finding {
    const CHECK: &str = "locked memory";
    const FIX: &str = "ulimit -l unlimited, LimitMEMLOCK=infinity, or the capability IPC_LOCK; needed only with --mlock on";
    match (limit, experts) {
        (Ok(None), _) => Finding::ok(CHECK, "no limit"),
        (Ok(Some(limit)), Some(experts)) if *limit >= experts => {
            Finding::ok(CHECK, format!("up to {}: all experts", Size(*limit)))
        }
        (Ok(Some(limit)), _) => {
            Finding::note(CHECK, format!("up to {}: --mlock on would lock less", Size(*limit)))
                .fix(FIX)
        }
        (Err(why), _) => Finding::unread(CHECK, why),
    }
}

fn mappings(limit: &Known<u64>) -> Finding {
    const CHECK: &str = "max_map_count";
    match limit {
        Ok(limit) if *limit >= MAPPINGS => Finding::ok(CHECK, limit.to_string()),
        Ok(limit) => Finding::warn(CHECK, format!("{limit}: mappings of experts may run out"))
            .fix("sysctl -w vm.max_map_count=262144"),
        Err(why) => Finding::unread(CHECK, why),
    }
}

fn huge(mode: &Known<String>) -> Finding {
    const CHECK: &str = "huge pages";
    match mode.as_deref() {
        Ok("never") => Finding::warn(
            CHECK,
            "never: experts lie in pages of 4 KiB, which slows drives and processors",
        )
        .fix("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        Ok(mode) => Finding::ok(CHECK, format!("transparent, {mode}")),
        Err(why) => Finding::unread(CHECK, why),
    }
}

fn reserved(memory: &MemoryFacts) -> Finding {
    const CHECK: &str = "reserved pages";
    match &memory.huge_reserved {
        Ok(0) => Finding::ok(CHECK, "none set aside"),
        Ok(bytes) => Finding::warn(
            CHECK,
            format!(
                "{} are set aside as explicit huge pages, which shimmer does not use",
                Size(*bytes)
            ),
        )
        .fix("sysctl -w vm.nr_hugepages=0, unless another program needs them"),
        Err(why) => Finding::unread(CHECK, why),
    }
}

fn swap(memory: &MemoryFacts) -> Finding {
    const CHECK: &str = "swap";
    match &memory.swap {
        Ok(0) => Finding::ok(CHECK, "none"),
        Ok(bytes) => Finding::note(
            CHECK,
            format!("{}: experts may be swapped out when memory runs short", Size(*bytes)),
        )
        .fix("swapoff -a, or workers with --mlock on"),
        Err(why) => Finding::unread(CHECK, why),
    }
}

pub(super) fn clock(clock: &ClockFacts) -> Vec<Finding> {
    let mut findings = vec![match clock.source.as_deref() {
        Ok(slow @ ("hpet" | "acpi_pm" | "jiffies")) => {
            let found = format!("{slow}: each look at the time is a call into the kernel");
            Finding::warn("clock source", found)
                .fix("echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource")
        }
        Ok(source) => Finding::ok("clock source", source),
        Err(why) => Finding::unread("clock source", why),
    }];
    let (drift, looked) = (clock.drift.as_millis(), clock.looked.as_millis());
    findings.push(if clock.year < YEAR_LEAST {
        let found = format!("the wall clock says {}: certificates are not valid yet", clock.year);
        Finding::fail("clock", found).fix("timedatectl set-ntp true")
    } else if drift > STEP_MS {
        let found = format!("the wall clock stepped by {drift} ms within {looked} ms");
        Finding::warn("clock", found).fix("chronyc makestep once, then let it slew")
    } else {
        Finding::ok("clock", format!("no step within {looked} ms"))
    });
    findings.push(match &clock.offset {
        Some(Ok(offset)) if offset.abs() > OFFSET_SECONDS => {
            let found = format!("etcd's clock is {offset:+.0} s from ours, to one second");
            Finding::warn("clock offset", found).fix("timedatectl set-ntp true on both hosts")
        }
        Some(Ok(offset)) => {
            Finding::ok("clock offset", format!("{offset:+.0} s to etcd, to one second"))
        }
        Some(Err(why)) => Finding::unread("clock offset", why),
        None => Finding::note(
            "clock offset",
            "not compared: members do not tell their time; --etcd with http:// does",
        ),
    });
    findings
}

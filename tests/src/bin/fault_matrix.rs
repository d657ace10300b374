//! Every fault, in every phase, with and without copies: real processes on several hosts of this machine.
//!
//! `cargo run --release -p shimmer-tests --bin fault_matrix -- [--only TEXT] [--rounds N] [--stopped-ms N] [--etcd NODES]
//! [--out FILE]`
//!
//! Runs each cell whose name contains TEXT, each on a cluster of its own, and writes tables in Markdown: one row per fault,
//! one per fault of etcd, and one per cell. It takes root, iproute2, nftables and etcd. The exit code is 1 if anything was
//! lost.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool that prints its result")]

use std::{
    env, fmt, fs,
    panic::{self, AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use shimmer_tests::lab::{
    cell::{Bench, Cell, Phase, Seen, percentile},
    etcd_cell::{EtcdCell, EtcdFault},
    fault::Fault,
};

/// How long the nodes of etcd stand still, and a worker whose lease is to expire.
const STORE_STOPPED: Duration = Duration::from_secs(60);
const LEASE_STOPPED: Duration = Duration::from_secs(12);

struct Options {
    only: String,
    rounds: usize,
    stopped: Option<Duration>,
    etcd: usize,
    out: Option<String>,
}

fn options() -> Result<Options> {
    let mut options = Options { only: String::new(), rounds: 1, stopped: None, etcd: 0, out: None };
    let mut args = env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().with_context(|| format!("{flag} takes a value"))?;
        match flag.as_str() {
            "--only" => options.only = value,
            "--rounds" => options.rounds = value.parse().context("--rounds")?,
            "--stopped-ms" => {
                options.stopped =
                    Some(Duration::from_millis(value.parse().context("--stopped-ms")?));
            }
            "--etcd" => options.etcd = value.parse().context("--etcd")?,
            "--out" => options.out = Some(value),
            _ => bail!("{flag} is none of --only, --rounds, --stopped-ms, --etcd and --out"),
        }
    }
    Ok(options)
}

fn cells() -> impl Iterator<Item = Cell> {
    Fault::ALL.into_iter().flat_map(|fault| {
        Phase::ALL.into_iter().flat_map(move |phase| {
            [2, 3].into_iter().flat_map(move |workers| {
                [1, 2].map(|replicas| Cell { fault, phase, workers, replicas })
            })
        })
    })
}

fn etcd_cells() -> impl Iterator<Item = EtcdCell> {
    EtcdFault::ALL.into_iter().flat_map(|fault| {
        let stopped = match fault {
            EtcdFault::AllStopped => STORE_STOPPED,
            EtcdFault::LeaseExpired => LEASE_STOPPED,
            EtcdFault::LeaderKilled | EtcdFault::Wiped => Duration::ZERO,
        };
        [Phase::Decode, Phase::Idle].map(|phase| EtcdCell { fault, phase, stopped })
    })
}

/// Runs some cells, each so many times, and says what came of each.
fn run<C: Copy + fmt::Display>(
    cells: impl Iterator<Item = C>,
    options: &Options,
    runs: impl Fn(C) -> Result<Seen, String>,
) -> (Vec<(C, Seen)>, usize) {
    let (mut all, mut lost) = (Vec::new(), 0);
    for cell in cells.filter(|cell| cell.to_string().contains(&options.only)) {
        for _ in 0..options.rounds {
            let begun = Instant::now();
            // A process that ends where none should is a finding of its cell, and no reason to leave out the others.
            match catch_unwind(AssertUnwindSafe(|| runs(cell))) {
                Ok(Ok(seen)) => {
                    println!("{cell}: {} ({:.1} s)", line(&seen), begun.elapsed().as_secs_f64());
                    lost += usize::from(!seen.is_clean());
                    all.push((cell, seen));
                }
                Ok(Err(reason)) => println!("skipped: {cell}: {reason}"),
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                    println!("BROKEN: {cell}: {}", text.lines().next().unwrap_or_default());
                    lost += 1;
                }
            }
        }
    }
    (all, lost)
}

fn main() -> Result<ExitCode> {
    let options = options()?;
    panic::set_hook(Box::new(|found| eprintln!("{found}")));
    let mut bench = Bench::new();
    bench.etcd = options.etcd;
    bench.stopped = options.stopped.unwrap_or(bench.stopped);
    let (of_workers, lost) = run(cells(), &options, |cell| bench.run(cell));
    let (of_etcd, lost_of_etcd) = run(etcd_cells(), &options, |cell| cell.run(&bench));
    let tables = [by_fault(&of_workers), by_etcd_cell(&of_etcd), by_cell(&of_workers)].join("\n");
    println!("\n{tables}");
    if let Some(out) = options.out {
        fs::write(&out, tables).with_context(|| out.clone())?;
    }
    let lost = lost + lost_of_etcd;
    println!("{} runs finished, {lost} with losses", of_workers.len() + of_etcd.len());
    Ok(if lost == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn ms(time: Duration) -> String {
    format!("{:.0}", time.as_secs_f64() * 1e3)
}

fn stalls(times: &[Duration]) -> String {
    [50, 99, 100].map(|percent| ms(percentile(times, percent))).join(", ")
}

fn line(seen: &Seen) -> String {
    let Seen { requests, failed, differing, .. } = seen;
    let mut line = format!(
        "{requests} requests, {failed} failed, {differing} differ, stalls {} ms",
        stalls(&seen.stalls)
    );
    match seen.mended {
        Some(time) => line += &format!(", whole after {} ms", ms(time)),
        None => line += ", NOT WHOLE AGAIN",
    }
    if !seen.struck {
        line += ", MISSED";
    }
    seen.failures.iter().for_each(|failure| line += &format!("\n    {failure}"));
    line
}

/// The columns of one cell, whatever it is of.
fn columns(seen: &Seen) -> String {
    let Seen { requests, failed, differing, .. } = seen;
    let whole = seen.mended.map_or("no".to_owned(), |time| format!("{} ms", ms(time)));
    let struck = if seen.struck { "yes" } else { "no" };
    format!("{requests} | {failed} | {differing} | {} | {struck} | {whole}", stalls(&seen.stalls))
}

fn by_cell(all: &[(Cell, Seen)]) -> String {
    let mut table = "| fault | phase | victim | copies | requests | failed | other bytes | added stall p50, p99, max, ms | struck | whole again |\n|---|---|---|---|---|---|---|---|---|---|\n".to_owned();
    for (cell, seen) in all {
        let Cell { fault, phase, workers, replicas } = cell;
        let (fault, phase) = (fault.name(), phase.name());
        table +=
            &format!("| {fault} | {phase} | 1 of {workers} | {replicas} | {} |\n", columns(seen));
    }
    table
}

fn by_etcd_cell(all: &[(EtcdCell, Seen)]) -> String {
    let mut table = "| etcd | phase | requests | failed | other bytes | added stall p50, p99, max, ms | struck | another worker serves |\n|---|---|---|---|---|---|---|---|\n".to_owned();
    for (cell, seen) in all {
        table +=
            &format!("| {} | {} | {} |\n", cell.fault.name(), cell.phase.name(), columns(seen));
    }
    table
}

fn by_fault(all: &[(Cell, Seen)]) -> String {
    let mut table = "| fault | copies | runs | requests | failed | other bytes | prefill: added stall p50, p99, max, ms | decode | idle |\n|---|---|---|---|---|---|---|---|---|\n".to_owned();
    for fault in Fault::ALL {
        for replicas in [1, 2] {
            let row: Vec<&(Cell, Seen)> = all
                .iter()
                .filter(|(cell, _)| cell.fault == fault && cell.replicas == replicas)
                .collect();
            if row.is_empty() {
                continue;
            }
            let total =
                |count: fn(&Seen) -> usize| row.iter().map(|(_, seen)| count(seen)).sum::<usize>();
            let of_phases = Phase::ALL.map(|phase| {
                let of_phase = row.iter().filter(|(cell, _)| cell.phase == phase);
                let times: Vec<Duration> =
                    of_phase.flat_map(|(_, seen)| seen.stalls.iter().copied()).collect();
                stalls(&times)
            });
            table += &format!(
                "| {} | {replicas} | {} | {} | {} | {} | {} |\n",
                fault.name(),
                row.len(),
                total(|seen| seen.requests),
                total(|seen| seen.failed),
                total(|seen| seen.differing),
                of_phases.join(" | ")
            );
        }
    }
    table
}

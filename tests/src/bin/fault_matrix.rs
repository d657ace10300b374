//! Every fault, in every phase, with and without copies: real processes on several hosts of this machine.
//!
//! `cargo run --release -p shimmer-tests --bin fault_matrix -- [--only TEXT] [--rounds N] [--stopped-ms N] [--out FILE]`
//!
//! Runs each cell whose name contains TEXT, each on a cluster of its own, and writes two tables in Markdown: one row per
//! cell, and one per fault. It takes root, iproute2 and nftables. The exit code is 1 if anything was lost.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool that prints its result")]

use std::{
    env,
    fmt::Write as _,
    fs,
    panic::{self, AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use shimmer_tests::lab::{
    cell::{Bench, Cell, Phase, Report, percentile},
    fault::Fault,
};

struct Options {
    only: String,
    rounds: usize,
    stopped: Option<Duration>,
    out: Option<String>,
}

fn options() -> Result<Options> {
    let mut options = Options { only: String::new(), rounds: 1, stopped: None, out: None };
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
            "--out" => options.out = Some(value),
            _ => bail!("{flag} is none of --only, --rounds, --stopped-ms and --out"),
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

fn main() -> Result<ExitCode> {
    let options = options()?;
    panic::set_hook(Box::new(|found| eprintln!("{found}")));
    let mut bench = Bench::new();
    bench.stopped = options.stopped.unwrap_or(bench.stopped);
    let mut reports = Vec::new();
    let mut broken = Vec::new();
    for cell in cells().filter(|cell| cell.to_string().contains(&options.only)) {
        for _ in 0..options.rounds {
            let begun = Instant::now();
            // A process that ends where none should is a finding of its cell, and no reason to leave out the others.
            match catch_unwind(AssertUnwindSafe(|| bench.run(cell))) {
                Ok(Ok(report)) => {
                    println!("{} ({:.1} s)", line(&report), begun.elapsed().as_secs_f64());
                    reports.push(report);
                }
                Ok(Err(reason)) => println!("skipped: {cell}: {reason}"),
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                    println!("BROKEN: {cell}: {text}");
                    broken.push(cell);
                }
            }
        }
    }
    let tables = by_fault(&reports) + "\n" + &by_cell(&reports);
    println!("\n{tables}");
    if let Some(out) = options.out {
        fs::write(&out, tables).with_context(|| out.clone())?;
    }
    let lost = reports.iter().filter(|report| !report.is_clean()).count() + broken.len();
    println!("{} runs, {lost} with losses", reports.len() + broken.len());
    Ok(if lost == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn ms(time: Duration) -> String {
    format!("{:.0}", time.as_secs_f64() * 1e3)
}

fn line(report: &Report) -> String {
    let stalls = [50, 99, 100].map(|percent| ms(report.stall(percent))).join("/");
    let mut line = format!(
        "{}: {} requests, {} failed, {} differ, stalls {stalls} ms",
        report.cell, report.requests, report.failed, report.differing
    );
    match report.mended {
        Some(time) => line += &format!(", whole after {} ms", ms(time)),
        None => line += ", NOT WHOLE AGAIN",
    }
    if !report.struck {
        line += ", MISSED";
    }
    report.failures.iter().for_each(|failure| line += &format!("\n    {failure}"));
    line
}

fn by_cell(reports: &[Report]) -> String {
    let mut table = "| fault | phase | victim | copies | requests | failed | other bytes | stall p50 | p99 | max, ms | struck | whole again |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n".to_owned();
    for report in reports {
        let Cell { fault, phase, workers, replicas } = report.cell;
        let [p50, p99, max] = [50, 99, 100].map(|percent| ms(report.stall(percent)));
        let (fault, phase) = (fault.name(), phase.name());
        let whole = report.mended.map_or("no".to_owned(), |time| format!("{} ms", ms(time)));
        let struck = if report.struck { "yes" } else { "no" };
        let Report { requests, failed, differing, .. } = report;
        writeln!(
            table,
            "| {fault} | {phase} | 1 of {workers} | {replicas} | {requests} | {failed} | {differing} | {p50} | {p99} | {max} | {struck} | {whole} |"
        )
        .expect("a string takes everything");
    }
    table
}

fn by_fault(reports: &[Report]) -> String {
    let mut table = "| fault | copies | runs | requests | failed | other bytes | prefill p50, p99, max | decode | idle, ms |\n|---|---|---|---|---|---|---|---|---|\n".to_owned();
    for fault in Fault::ALL {
        for replicas in [1, 2] {
            let of_row: Vec<&Report> = reports
                .iter()
                .filter(|report| report.cell.fault == fault && report.cell.replicas == replicas)
                .collect();
            if of_row.is_empty() {
                continue;
            }
            let total =
                |count: fn(&Report) -> usize| of_row.iter().map(|r| count(r)).sum::<usize>();
            let stalls = Phase::ALL.map(|phase| {
                let stalls: Vec<Duration> = of_row
                    .iter()
                    .filter(|report| report.cell.phase == phase)
                    .flat_map(|report| report.stalls.iter().copied())
                    .collect();
                [50, 99, 100].map(|percent| ms(percentile(&stalls, percent))).join(", ")
            });
            writeln!(
                table,
                "| {} | {replicas} | {} | {} | {} | {} | {} |",
                fault.name(),
                of_row.len(),
                total(|report| report.requests),
                total(|report| report.failed),
                total(|report| report.differing),
                stalls.join(" | ")
            )
            .expect("a string takes everything");
        }
    }
    table
}

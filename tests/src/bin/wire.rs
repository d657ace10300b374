//! Puts a delay before a server: `cargo run --release -p shimmer-tests --bin wire -- ADDRESS DELAY_US`
//!
//! Prints where it listens, then passes bytes on, each way so many microseconds late, until it is killed.

#![allow(clippy::print_stdout, reason = "a tool that prints its result")]

use std::{net::Ipv4Addr, thread, time::Duration};

use anyhow::{Context as _, Result};
use shimmer_tests::lab::wire::Wire;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let mut next = || args.next().context("usage: wire ADDRESS DELAY_US");
    let target = next()?.parse().context("ADDRESS")?;
    let delay = Duration::from_micros(next()?.parse().context("DELAY_US")?);
    let wire = Wire::new(Ipv4Addr::LOCALHOST.into(), target, delay);
    println!("listening on {}", wire.address());
    loop {
        thread::park();
    }
}

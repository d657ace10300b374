//! The one binary of Shimmer. Everything is in the library, where tests can reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    shimmer_cli::run(std::env::args_os())
}

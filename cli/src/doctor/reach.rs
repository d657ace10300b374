//! Asks etcd and other members.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use shimmer_model::Container;
use shimmer_proto::{
    address::PeerAddress,
    expert::v1::{
        CoordinatorHello, Identity, SessionRequest, expert_service_client::ExpertServiceClient,
        expert_service_server, session_request::Body as Ask, session_response::Body as Said,
    },
    identity,
    limits::{self, MAX_MESSAGE_BYTES},
    membership::Condition,
    tls::Dialer,
    v1::{GetModelRequest, inference_service_client::InferenceServiceClient},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tonic::{Code, Request, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::{EtcdFacts, Known, PeerFacts, PeerKind};
use crate::{commands::BUILD, config::ClusterConfig};

/// Patience with a member or a store: a live one answers in milliseconds.
const LIMIT: Duration = Duration::from_secs(5);
/// Health checks of a peer; the fastest is its round trip.
const CHECKS: usize = 5;

/// What a member of this container would say of itself.
pub(crate) fn identity_of(container: &Container) -> Identity {
    Identity {
        protocol_version: limits::PROTOCOL_VERSION,
        build: BUILD.to_owned(),
        math_id: shimmer_kernels::MATH_ID.to_owned(),
        container_digest: container.digest().to_owned(),
        numeric_class: container.manifest().numeric_class.to_string(),
    }
}

/// Connects to the store as a member would, and reads what there is of the cluster.
pub(crate) async fn etcd(config: &ClusterConfig) -> EtcdFacts {
    let began = Instant::now();
    let mut name = config.name();
    let answer = async {
        let store = config.connect("doctor").map_err(|error| flat(&error))?;
        name = store.describe();
        let mut watch = store.watch();
        let known = timeout(LIMIT, async {
            watch
                .wait_for(|snapshot| snapshot.revision > 0 && snapshot.disconnected.is_none())
                .await
                .map(|snapshot| snapshot.entries.len())
        })
        .await;
        let entries = match known {
            Ok(Ok(entries)) => entries,
            Ok(Err(_)) => return Err("the store has ended".to_owned()),
            Err(_) => {
                let cause = watch.borrow().disconnected.clone().map(|outage| outage.cause);
                let waited = LIMIT.as_secs();
                return Err(cause.unwrap_or_else(|| format!("no answer within {waited} s")));
            }
        };
        let first = began.elapsed();
        // A transaction that only compares: nothing is written.
        let asked = Instant::now();
        let condition = Condition { key: "doctor".to_owned(), revision: None };
        let round = store.write(vec![condition], Vec::new()).await;
        let round = round.map(|_| asked.elapsed()).map_err(|error| error.to_string());
        timeout(LIMIT, store.leave()).await.ok();
        Ok((first, entries, round))
    }
    .await;
    EtcdFacts { name, answer, tls: config.is_tls(), user: config.has_user() }
}

/// Seconds by which the clock behind an HTTP endpoint is ahead, by the date that its answer carries.
pub(crate) async fn offset(address: &PeerAddress) -> Known<f64> {
    let ask = async {
        let mut stream = TcpStream::connect((address.host(), address.port())).await?;
        let request =
            format!("GET /version HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(16 << 10).read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = match timeout(LIMIT, ask).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => return Err(format!("{address}: {error}")),
        Err(_) => return Err(format!("{address}: no answer within {} s", LIMIT.as_secs())),
    };
    let text = String::from_utf8_lossy(&answer);
    let date = text.lines().find_map(|line| {
        line.split_once(':').filter(|(name, _)| name.eq_ignore_ascii_case("date")).map(|(_, d)| d)
    });
    let date = date.ok_or_else(|| format!("{address}: its answer has no date"))?;
    let theirs = seconds_of(date).ok_or_else(|| format!("{address}: {date:?} is no date"))?;
    let ours = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let ours = i64::try_from(ours).unwrap_or(i64::MAX);
    #[expect(clippy::cast_precision_loss, reason = "some seconds")]
    let offset = (theirs - ours) as f64;
    Ok(offset)
}

/// Seconds since 1970 of a date as HTTP writes it: `Sun, 06 Nov 1994 08:49:37 GMT`.
pub(super) fn seconds_of(date: &str) -> Option<i64> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let mut words = date.split_whitespace().skip(1);
    let day: i64 = words.next()?.parse().ok()?;
    let name = words.next()?;
    let month = i64::try_from(MONTHS.iter().position(|month| *month == name)?).ok()? + 1;
    let year: i64 = words.next()?.parse().ok()?;
    let mut time = words.next()?.split(':').map(|part| part.parse::<i64>().ok());
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    // Days from the civil calendar; years begin in March, so that the leap day is their last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * month + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

/// Connects to a member, asks whether it is alive, and what it is.
pub(crate) async fn peer(
    address: &PeerAddress,
    dialer: &Dialer,
    ours: Option<&Identity>,
) -> PeerFacts {
    let answer = async {
        let began = Instant::now();
        let channel = dialer.connect(address, LIMIT).await.map_err(|error| error.to_string())?;
        let connect = began.elapsed();
        let answer = health(&channel).await?;
        let kind = match timeout(LIMIT, kind(&channel, ours)).await {
            Ok(kind) => kind?,
            Err(_) => PeerKind::Refuses(format!("no hello within {} s", LIMIT.as_secs())),
        };
        Ok((connect, answer, kind))
    }
    .await;
    PeerFacts { address: address.to_string(), answer }
}

/// The shortest of some health checks.
async fn health(channel: &Channel) -> Known<Duration> {
    let mut least = Duration::MAX;
    for _ in 0..CHECKS {
        let began = Instant::now();
        check(channel, "").await?;
        least = least.min(began.elapsed());
    }
    Ok(least)
}

/// Whether somebody who answers health checks knows a service, whatever its state. Nothing else is a member's answer: a
/// page of figures and other servers of gRPC answer as well, each in its own way.
async fn check(channel: &Channel, service: &str) -> Known<bool> {
    let mut request = Request::new(HealthCheckRequest { service: service.to_owned() });
    request.set_timeout(LIMIT);
    let answer = timeout(LIMIT, HealthClient::new(channel.clone()).check(request)).await;
    match answer {
        Err(_) => Err(format!("no answer to a health check within {} s", LIMIT.as_secs())),
        Ok(Ok(_)) => Ok(true),
        Ok(Err(status)) if status.code() == Code::NotFound => Ok(false),
        Ok(Err(status)) => {
            let why = match status.message() {
                "" => status.code().description(),
                message => message,
            };
            Err(format!("no member's answer to a health check: {}", identity::shown(why)))
        }
    }
}

async fn kind(channel: &Channel, ours: Option<&Identity>) -> Known<PeerKind> {
    let mut model = InferenceServiceClient::new(channel.clone());
    match model.get_model(GetModelRequest {}).await {
        Ok(answer) => {
            let print = answer.into_inner().fingerprint.unwrap_or_default();
            let digest = print.container_digest;
            if let Some(ours) = ours.filter(|ours| ours.container_digest != digest) {
                let own = &ours.container_digest;
                return Ok(PeerKind::Refuses(format!(
                    "it serves container {digest}, ours is {own}"
                )));
            }
            return Ok(PeerKind::Coordinator { build: print.build, digest });
        }
        Err(status) if status.code() == Code::Unauthenticated => {
            let build = "which wants an API key to say more".to_owned();
            return Ok(PeerKind::Coordinator { build, digest: "unknown".to_owned() });
        }
        Err(_) => {}
    }
    if !check(channel, expert_service_server::SERVICE_NAME).await? {
        return Ok(PeerKind::Stranger);
    }
    let Some(ours) = ours else { return Ok(PeerKind::Healthy) };
    Ok(hello(channel, ours).await.unwrap_or_else(PeerKind::Refuses))
}

/// A coordinator's first message, and what the worker says to it. Nothing follows, so nothing is placed.
async fn hello(channel: &Channel, ours: &Identity) -> Known<PeerKind> {
    let mut client =
        ExpertServiceClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let hello = CoordinatorHello {
        identity: Some(ours.clone()),
        limits: Some(limits::announced()),
        coordinator_id: "doctor".to_owned(),
    };
    let (send, receive) = tokio::sync::mpsc::channel(1);
    let ask = SessionRequest { body: Some(Ask::Hello(hello)) };
    send.send(ask).await.expect("the other end is below");
    let requests = tokio_stream::wrappers::ReceiverStream::new(receive);
    let answer = client.session(requests).await;
    let told = |status: &tonic::Status| shimmer_proto::status::told(status).to_owned();
    let mut said = answer.map_err(|status| told(&status))?.into_inner();
    let message = said.message().await.map_err(|status| told(&status))?;
    drop(send);
    match message.and_then(|message| message.body) {
        Some(Said::Hello(theirs)) => {
            let found = theirs.identity.unwrap_or_default();
            identity::compare("this host", ours, &theirs.worker_id, &found)
                .map_err(|error| error.to_string())?;
            let draining = theirs.draining;
            Ok(PeerKind::Worker { id: theirs.worker_id, build: found.build, draining })
        }
        Some(Said::Error(error)) => Err(error.detail),
        _ => Err("it ended the stream without a hello".to_owned()),
    }
}

fn flat(error: &crate::error::Error) -> String {
    error.render().unwrap_or_default().replace('\n', " ")
}

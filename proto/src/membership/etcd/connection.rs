//! One connection at a time to one node of etcd, made again elsewhere as soon as anybody finds that it does not answer.
//!
//! The client library can spread requests over all nodes. It then keeps asking one that hangs or has lost its leader for its
//! share of them, and tells nobody which one it was.

use std::{
    future::Future,
    path::Path,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use tokio::time::timeout;

use super::{
    config::{EtcdConfig, EtcdTls},
    failure::Failure,
};

/// Kept open through firewalls and noticed when the other host is gone. HTTP/2 pings are not used: etcd throws out clients
/// that send them while nothing else is going on, and the watch asks for signs of life itself.
const TCP_KEEPALIVE: Duration = Duration::from_secs(10);

/// The connection in use.
#[derive(Debug)]
pub(super) struct Connections {
    state: Mutex<State>,
}

struct State {
    /// Which of the endpoints.
    place: usize,
    /// Grows with every change of place.
    number: u64,
    client: Option<Client>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Connections {
    /// Begins with the endpoint that the seed decides, so that members spread.
    pub(super) fn new(config: &EtcdConfig) -> Self {
        let count = u64::try_from(config.endpoints.len()).unwrap_or(1).max(1);
        let place = usize::try_from(config.seed % count).unwrap_or(0);
        Self { state: Mutex::new(State { place, number: 0, client: None }) }
    }

    /// Makes one request. After a failure that another node might not have, the next request goes there.
    pub(super) async fn attempt<T, F>(
        &self,
        config: &EtcdConfig,
        limit: Duration,
        call: impl FnOnce(Client) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let (number, place) = self.place();
        let endpoint = config.endpoints[place % config.endpoints.len()].as_str();
        let tried = timeout(limit, async {
            let client = Box::pin(self.current(config, endpoint, number)).await?;
            Box::pin(call(client)).await.map_err(|error| Failure::of(endpoint, &error))
        });
        let answer = tried.await.unwrap_or_else(|_| {
            let waited = limit.as_millis();
            Err(Failure::Unanswered(format!("{endpoint}: no answer within {waited} ms")))
        });
        if let Err(Failure::Unanswered(_) | Failure::Unauthenticated(_)) = &answer {
            self.leave(number, config.endpoints.len());
        }
        answer
    }

    fn place(&self) -> (u64, usize) {
        let state = self.lock();
        (state.number, state.place)
    }

    /// The client of a connection, a new one if there is none yet.
    async fn current(
        &self,
        config: &EtcdConfig,
        endpoint: &str,
        number: u64,
    ) -> Result<Client, Failure> {
        let known = {
            let state = self.lock();
            state.client.clone().filter(|_| state.number == number)
        };
        if let Some(client) = known {
            return Ok(client);
        }
        let options = options(config)?;
        let client = Client::connect([endpoint], Some(options))
            .await
            .map_err(|error| Failure::of(endpoint, &error))?;
        let mut state = self.lock();
        if state.number == number {
            state.client = Some(client.clone());
        }
        Ok(client)
    }

    /// Gives up a connection, unless somebody has done so already.
    fn leave(&self, number: u64, endpoints: usize) {
        let mut state = self.lock();
        if state.number == number {
            state.number += 1;
            state.place = (state.place + 1) % endpoints.max(1);
            state.client = None;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn options(config: &EtcdConfig) -> Result<ConnectOptions, Failure> {
    let mut options = ConnectOptions::new()
        .with_connect_timeout(config.attempt())
        .with_tcp_keepalive(TCP_KEEPALIVE)
        // A node that has lost its leader says so, instead of hanging or of showing what is old.
        .with_require_leader(true);
    if let Some(user) = &config.user {
        options = options
            .with_user(user.name.clone(), user.password.clone())
            .with_auto_token_refresh(true);
    }
    if let Some(tls) = &config.tls {
        options = options.with_tls(tls_options(tls)?);
    }
    Ok(options)
}

fn tls_options(tls: &EtcdTls) -> Result<TlsOptions, Failure> {
    let read = |path: &Path, flag: &str| {
        std::fs::read(path)
            .map_err(|error| Failure::Refused(format!("{flag} {}: {error}", path.display())))
    };
    let mut options =
        TlsOptions::new().ca_certificate(Certificate::from_pem(read(&tls.ca, "--etcd-ca")?));
    if let Some((certificate, key)) = &tls.identity {
        let certificate = read(certificate, "--etcd-cert")?;
        options = options.identity(Identity::from_pem(certificate, read(key, "--etcd-key")?));
    }
    Ok(options)
}

//! How the membership store stands, for the pages of workers and coordinators.

use std::{fmt, time::SystemTime};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder},
    metrics::MetricType,
};
use serde::Serialize;
use shimmer_proto::membership::{
    Snapshot,
    records::{COORDINATORS, WORKERS, id_in},
};
use tokio::sync::watch;

/// The store at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MembershipReport {
    connected: bool,
    outage_seconds: f64,
    revision: u64,
    lease_held: bool,
    workers: u64,
    coordinators: u64,
}

impl MembershipReport {
    pub(crate) fn of(snapshot: &Snapshot, now: SystemTime) -> Self {
        let outage = snapshot.disconnected.as_ref();
        let lasted = outage.and_then(|outage| now.duration_since(outage.since).ok());
        let count = |folder| snapshot.entries.keys().filter_map(|key| id_in(folder, key)).count();
        let count = |folder| u64::try_from(count(folder)).unwrap_or(u64::MAX);
        Self {
            connected: outage.is_none(),
            outage_seconds: lasted.unwrap_or_default().as_secs_f64(),
            revision: snapshot.revision,
            lease_held: snapshot.lease != 0,
            workers: count(WORKERS),
            coordinators: count(COORDINATORS),
        }
    }
}

fn gauge<'a>(
    encoder: &'a mut DescriptorEncoder<'_>,
    name: &'a str,
    help: &'a str,
) -> Result<MetricEncoder<'a>, fmt::Error> {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)
}

/// Encodes the newest snapshot whenever it is asked for.
#[derive(Debug)]
pub(crate) struct MembershipCollector(pub(crate) watch::Receiver<Snapshot>);

impl Collector for MembershipCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let report = MembershipReport::of(&self.0.borrow(), SystemTime::now());
        gauge(
            &mut encoder,
            "shimmer_membership_connected",
            "1 while the membership store answers; a list always does.",
        )?
        .encode_gauge(&u64::from(report.connected))?;
        gauge(
            &mut encoder,
            "shimmer_membership_outage_seconds",
            "Time since the store was last heard of, while it does not answer.",
        )?
        .encode_gauge(&report.outage_seconds)?;
        gauge(
            &mut encoder,
            "shimmer_membership_revision",
            "Revision of what this process knows of it.",
        )?
        .encode_gauge(&report.revision)?;
        gauge(
            &mut encoder,
            "shimmer_membership_lease_held",
            "1 while this process counts on its lease.",
        )?
        .encode_gauge(&u64::from(report.lease_held))?;
        let mut members =
            gauge(&mut encoder, "shimmer_membership_members", "Members that are listed.")?;
        for (role, count) in [("worker", report.workers), ("coordinator", report.coordinators)] {
            members.encode_family(&[("role", role)])?.encode_gauge(&count)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shimmer_proto::membership::{Entry, Outage};

    use super::*;

    #[test]
    fn what_a_snapshot_says() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(100);
        let keys = ["coordinators/c", "placement", "workers/", "workers/1", "workers/2"];
        let entries = keys.map(|key| (key.to_owned(), Entry::default())).into();
        let mut snapshot = Snapshot { revision: 7, entries, lease: 3, disconnected: None };
        let report = MembershipReport::of(&snapshot, now);
        assert_eq!((report.workers, report.coordinators, report.revision), (2, 1, 7));
        assert!(report.connected && report.lease_held && report.outage_seconds == 0.0);
        let since = SystemTime::UNIX_EPOCH + Duration::from_secs(40);
        snapshot.disconnected = Some(Outage { cause: "x".to_owned(), since });
        snapshot.lease = 0;
        let report = MembershipReport::of(&snapshot, now);
        assert!(!report.connected && !report.lease_held);
        assert!((report.outage_seconds - 60.0).abs() < 1e-9);
    }
}

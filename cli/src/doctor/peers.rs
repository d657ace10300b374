//! The membership store and other members.

use std::time::Duration;

use super::{EtcdFacts, Finding, PeerFacts, PeerKind};

/// A store that takes longer for one transaction renews leases late.
const SLOW_STORE: Duration = Duration::from_millis(100);
/// A round trip is paid once for each layer with experts: this much makes tokens slow.
const SLOW_PEER: Duration = Duration::from_millis(2);

pub(super) fn etcd(etcd: &EtcdFacts) -> Vec<Finding> {
    const CHECK: &str = "etcd";
    let (first, members, round) = match &etcd.answer {
        Ok(answer) => answer,
        Err(why) => {
            let fix = if etcd.tls {
                "etcdctl --cacert CA endpoint health"
            } else {
                "etcdctl endpoint health"
            };
            return vec![Finding::fail(CHECK, why.clone()).fix(fix)];
        }
    };
    let (tls, user) = (
        if etcd.tls { "TLS" } else { "plaintext" },
        if etcd.user { "with a user" } else { "without authentication" },
    );
    let found = format!(
        "{} answers after {} ms, {tls}, {user}, {members} keys of this cluster",
        etcd.name,
        first.as_millis()
    );
    let mut findings = vec![if etcd.tls || is_local(&etcd.name) {
        Finding::ok(CHECK, found)
    } else {
        Finding::note(CHECK, format!("{found}: whoever reaches it can change the cluster"))
            .fix("https:// endpoints with --etcd-ca, and --etcd-user")
    }];
    findings.push(match round {
        Ok(round) if *round > SLOW_STORE => {
            let found = format!("one transaction takes {}", shown(*round));
            Finding::warn("etcd latency", found).fix(
                "give etcd a drive of its own; see its metric etcd_disk_wal_fsync_duration_seconds",
            )
        }
        Ok(round) => {
            Finding::ok("etcd latency", format!("one transaction takes {}", shown(*round)))
        }
        Err(why) => Finding::fail("etcd latency", format!("it answers reads, but: {why}"))
            .fix("etcdctl endpoint status; grant the user read and write below /shimmer/NAME/"),
    });
    findings
}

fn is_local(name: &str) -> bool {
    ["//127.", "//localhost:", "//[::1]:"].iter().any(|host| name.contains(host))
}

pub(super) fn peer(peer: &PeerFacts) -> Finding {
    let check = format!("peer {}", peer.address);
    let (connect, answer, kind) = match &peer.answer {
        Ok(answer) => answer,
        Err(why) => {
            return Finding::fail(&check, why.clone()).fix(
                "start it, let firewall and NetworkPolicy admit this host, and give --peers the port of its --listen",
            );
        }
    };
    let times = format!("connects in {}, answers in {}", shown(*connect), shown(*answer));
    let finding = match kind {
        PeerKind::Refuses(why) => {
            return Finding::fail(&check, format!("{why}; {times}"))
                .fix("run the same version and the same container on every member");
        }
        PeerKind::Stranger => {
            let found =
                format!("answers health checks, but is neither worker nor coordinator; {times}");
            return Finding::fail(&check, found)
                .fix("give --peers the port of a member's --listen");
        }
        PeerKind::Worker { id, build, draining } => {
            let leaving = if *draining { ", about to leave" } else { "" };
            let found = format!("worker {id}, {build}{leaving}; {times}");
            if *draining { Finding::note(&check, found) } else { Finding::ok(&check, found) }
        }
        PeerKind::Coordinator { build, digest } => Finding::ok(
            &check,
            format!(
                "coordinator, {build}, container {}; {times}",
                digest.get(..12).unwrap_or(digest)
            ),
        ),
        PeerKind::Healthy => Finding::ok(
            &check,
            format!("answers health checks; --container compares more; {times}"),
        ),
    };
    if *answer > SLOW_PEER && finding.level == super::Level::Ok {
        let text = format!("{}: each layer of each token waits as long", finding.found);
        return Finding::warn(&check, text).fix("put members into one rack or zone");
    }
    finding
}

fn shown(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

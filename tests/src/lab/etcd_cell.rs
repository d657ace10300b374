//! One cell of the second matrix: what happens to the etcd in which members find each other.

use std::{
    fmt, thread,
    time::{Duration, Instant},
};

use super::{
    cell::{Bench, Phase, Seen},
    deployment::Deployment,
};

/// Nodes of the etcd.
const NODES: usize = 3;
/// Members say that often that they live; three times that without a sign, and they are gone.
const LEASE: Duration = Duration::from_secs(2);
/// For a worker to be taken up, when etcd is well.
const JOIN_DEADLINE: Duration = Duration::from_secs(60);

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EtcdFault {
    /// The leader of three nodes is killed.
    LeaderKilled,
    /// All nodes stand still for some time.
    AllStopped,
    /// A worker stands still for so long that its lease expires.
    LeaseExpired,
    /// All nodes are killed, and come back without their data.
    Wiped,
}

impl EtcdFault {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::LeaderKilled, Self::AllStopped, Self::LeaseExpired, Self::Wiped];

    /// As it stands in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LeaderKilled => "leader of three killed",
            Self::AllStopped => "all three stopped",
            Self::LeaseExpired => "lease expired while the worker was stopped",
            Self::Wiped => "data wiped",
        }
    }
}

/// Conditions of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EtcdCell {
    /// What happens.
    pub fault: EtcdFault,
    /// When.
    pub phase: Phase,
    /// How long something stands still.
    pub stopped: Duration,
}

impl fmt::Display for EtcdCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd: {}, {}", self.fault.name(), self.phase.name())
    }
}

impl EtcdCell {
    /// Runs it on a cluster of its own: two workers, and a third that joins when the fault is over. The time to be whole again
    /// is the time until that one serves.
    ///
    /// # Errors
    /// Why this machine cannot have it.
    ///
    /// # Panics
    /// The cluster does not start.
    pub fn run(self, bench: &Bench) -> Result<Seen, String> {
        let mut plan = bench.plan(3, 1);
        plan.etcd = NODES;
        plan.member_args = vec!["--lease".to_owned(), format!("{}s", LEASE.as_secs())];
        let (victim, newcomer) = (0, 2);
        plan.workers[newcomer].late = true;
        let mut cluster = Deployment::start(&plan)?;
        Ok(bench.watch(&mut cluster, self.phase, true, |_| {
            move |cluster: &mut Deployment| {
                let struck = Instant::now();
                self.strike(cluster, victim);
                move |cluster: &mut Deployment| {
                    thread::sleep(self.stopped.saturating_sub(struck.elapsed()));
                    self.end(cluster, victim);
                    let begun = Instant::now();
                    cluster.launch_worker(newcomer);
                    let serves = || {
                        let states = [victim, newcomer].map(|worker| cluster.state_of(worker));
                        states
                            .iter()
                            .all(|state| state.as_ref().is_some_and(|of| of.state == "serving"))
                    };
                    while !serves() && begun.elapsed() < JOIN_DEADLINE {
                        thread::sleep(Duration::from_millis(20));
                    }
                    (true, serves().then(|| begun.elapsed()))
                }
            }
        }))
    }

    fn strike(self, cluster: &mut Deployment, victim: usize) {
        match self.fault {
            EtcdFault::LeaderKilled => {
                let leader = cluster.etcd().leader();
                cluster.etcd().kill(leader);
            }
            EtcdFault::AllStopped => {
                (0..NODES).for_each(|node| cluster.etcd().signal(node, "STOP"))
            }
            EtcdFault::LeaseExpired => cluster.workers()[victim].process().signal("STOP"),
            EtcdFault::Wiped => cluster.etcd().wipe(),
        }
    }

    fn end(self, cluster: &mut Deployment, victim: usize) {
        match self.fault {
            EtcdFault::AllStopped => {
                (0..NODES).for_each(|node| cluster.etcd().signal(node, "CONT"))
            }
            EtcdFault::LeaseExpired => cluster.workers()[victim].process().signal("CONT"),
            EtcdFault::LeaderKilled | EtcdFault::Wiped => cluster.etcd().restart_all(),
        }
    }
}

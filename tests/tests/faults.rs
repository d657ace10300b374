//! Faults of single workers on several hosts of this machine: no request is lost, no byte is another one, and nobody waits
//! long. Part of the fault matrix; `shimmer-tests --bin fault_matrix` runs all of it.

use std::{net::UdpSocket, time::Duration};

use shimmer_tests::{
    lab::{
        cell::{Bench, Cell, Phase},
        fault::Fault,
        network::{Cut, Network},
    },
    wait::wait_until,
};

/// For anything that a loaded machine does in a moment.
const SOON: Duration = Duration::from_secs(20);
/// An event comes late by less than the deadline of a layer, on a machine of any load. What it is on a quiet one is measured:
/// docs/perf.
const STALL_MAX: Duration = Duration::from_secs(10);

fn check(fault: Fault, phase: Phase, workers: usize, replicas: usize) {
    let mut bench = Bench::new();
    bench.stopped = Duration::from_secs(4);
    let cell = Cell { fault, phase, workers, replicas };
    let seen = match bench.run(cell) {
        Ok(seen) => seen,
        Err(reason) => return println!("skipped: {cell}: {reason}"),
    };
    println!(
        "{cell}: stalls of at most {:?}, whole again after {:?}",
        seen.stall(100),
        seen.mended
    );
    assert_eq!((seen.failed, seen.differing), (0, 0), "{cell}: {:?}", seen.failures);
    assert!(seen.struck, "{cell}: the fault was not met in its phase");
    assert!(seen.mended.is_some(), "{cell}: the cluster is not whole again");
    assert!(seen.stall(99) < STALL_MAX, "{cell}: a stall of {:?}", seen.stall(99));
}

#[test]
fn a_killed_worker_loses_no_request_in_mid_decode() {
    check(Fault::Kill, Phase::Decode, 2, 1);
}

#[test]
fn a_killed_worker_loses_no_request_in_prefill_where_there_are_copies() {
    check(Fault::Kill, Phase::Prefill, 3, 2);
}

#[test]
fn a_killed_worker_is_no_matter_for_the_requests_after_it() {
    check(Fault::Kill, Phase::Idle, 2, 1);
}

#[test]
fn a_stopped_worker_that_goes_on_later_changes_no_byte() {
    check(Fault::Stop, Phase::Decode, 2, 2);
    check(Fault::Stop, Phase::Prefill, 3, 1);
}

#[test]
fn a_worker_that_is_cut_off_loses_no_request() {
    check(Fault::Partition, Phase::Decode, 3, 2);
}

#[test]
fn a_worker_that_is_cut_off_in_one_direction_loses_no_request() {
    check(Fault::Mute, Phase::Decode, 2, 1);
    check(Fault::Deaf, Phase::Prefill, 3, 2);
}

#[test]
fn a_worker_that_is_ten_times_slower_holds_nobody_up() {
    check(Fault::Slow, Phase::Decode, 3, 2);
}

#[test]
fn a_bit_that_flips_on_the_wire_never_enters_a_sum() {
    check(Fault::FlippedWork, Phase::Prefill, 2, 1);
    check(Fault::FlippedResult, Phase::Decode, 2, 2);
    check(Fault::FlippedFraming, Phase::Decode, 3, 1);
}

#[test]
fn bits_that_flip_in_memory_are_found_by_the_audit() {
    check(Fault::FlippedMemory, Phase::Decode, 3, 2);
}

#[test]
fn bits_that_flip_on_the_drive_are_answered_by_others() {
    check(Fault::FlippedSlab, Phase::Prefill, 2, 1);
}

#[test]
fn a_drive_that_dies_loses_no_request() {
    check(Fault::DriveError, Phase::Decode, 3, 1);
}

#[test]
fn a_worker_that_is_killed_for_memory_loses_no_request() {
    check(Fault::OutOfMemory, Phase::Decode, 2, 1);
}

/// Datagrams between this process and one host, each way.
struct Datagrams<'a> {
    network: &'a Network,
    socket: UdpSocket,
}

impl Datagrams<'_> {
    /// The host sends.
    fn say(&self, text: &str) {
        let to = self.socket.local_addr().unwrap();
        let say = format!("echo -n {text} > /dev/udp/{}/{}", to.ip(), to.port());
        let status = self.network.command(0, "bash").args(["-c", &say]).status();
        assert!(status.unwrap().success(), "{say}");
    }

    /// What comes from the host.
    fn hear(&self) -> String {
        let mut bytes = [0; 16];
        let count = self.socket.recv(&mut bytes).expect("the host is heard");
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    }

    /// This process sends, to where nobody listens.
    fn tell(&self) {
        self.socket.send_to(b"x", (self.network.address(0), 9)).unwrap();
    }

    /// How many of those came through.
    fn told(&self) -> u64 {
        let output = self.network.command(0, "cat").arg("/proc/net/snmp").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let mut lines = text.lines().filter(|line| line.starts_with("Udp:"));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let mut pairs = names.split_whitespace().zip(values.split_whitespace());
        pairs.find(|(name, _)| *name == "NoPorts").unwrap().1.parse().unwrap()
    }

    fn wait_until_told(&self, count: u64) {
        wait_until("a datagram to reach the host", SOON, || self.told() >= count);
        assert_eq!(self.told(), count, "what was cut off came through");
    }
}

/// The means themselves.
#[test]
fn cuts_lose_frames_in_their_direction_only_and_heal() {
    let network = match Network::new(1) {
        Ok(network) => network,
        Err(reason) => return println!("skipped: several hosts: {reason}"),
    };
    let socket = UdpSocket::bind((network.outside(), 0)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let datagrams = Datagrams { network: &network, socket };
    datagrams.say("a");
    assert_eq!(datagrams.hear(), "a");
    datagrams.tell();
    datagrams.wait_until_told(1);

    network.cut(0, Cut::From);
    datagrams.say("b");
    datagrams.tell();
    datagrams.wait_until_told(2);
    network.heal();
    datagrams.say("c");
    assert_eq!(datagrams.hear(), "c");

    network.cut(0, Cut::To);
    datagrams.tell();
    datagrams.say("d");
    assert_eq!(datagrams.hear(), "d");
    network.heal();
    datagrams.tell();
    datagrams.wait_until_told(3);

    network.cut(0, Cut::Both);
    datagrams.tell();
    datagrams.say("e");
    network.heal();
    datagrams.tell();
    datagrams.wait_until_told(4);
    datagrams.say("f");
    assert_eq!(datagrams.hear(), "f");
}

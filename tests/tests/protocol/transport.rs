//! A coordinator's links: the same bytes from any number of workers, and what happens when one fails.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use shimmer_coordinator::{
    dispatch::{ExpertTransport as _, Standing, TransportError},
    membership::leader::Timings,
    transport::{RemoteConfig, RemoteWorkers},
};
use shimmer_proto::expert::v1::{ExpertWork, Fence, PrefetchHint};
use shimmer_tests::wait::{wait_for, wait_until};
use shimmer_worker::ServeConfig;

use super::{
    bench::{
        self, SOON, WorkerServer, connect, connect_all, expected_sums, moe_layers, quick, run_step,
        wait_complete, wait_told,
    },
    meddler::{Fault, Meddler},
};

fn servers(weights: &[f64]) -> Vec<WorkerServer> {
    let start = |(index, &weight): (usize, &f64)| {
        let core = bench::core(bench::container(), &format!("w{index}"), weight);
        WorkerServer::with(core, 0, ServeConfig::default())
    };
    weights.iter().enumerate().map(start).collect()
}

fn addresses(servers: &[WorkerServer]) -> Vec<String> {
    servers.iter().map(WorkerServer::address).collect()
}

/// Owners of all experts.
fn owners(remote: &RemoteWorkers) -> Vec<usize> {
    let experts = moe_layers().into_iter().flat_map(|(layer, n)| (0..n).map(move |e| (layer, e)));
    experts.map(|(layer, e)| remote.owner(layer, e).unwrap()).collect()
}

/// The loss that a step ends with.
fn lost(remote: &mut RemoteWorkers, step: u64) -> (usize, String) {
    match run_step(remote, step, 2) {
        Err(TransportError::Lost { worker, detail }) => (worker, detail),
        other => panic!("expected a lost worker, got {other:?}"),
    }
}

#[test]
fn any_number_of_workers_gives_the_same_sums() {
    for rows in [1, 5, 70] {
        let expected = expected_sums(rows);
        for weights in [&[1.0][..], &[1.0, 1.0], &[3.0, 1.0], &[1.0; 3], &[1.0, 2.0, 3.0, 4.0, 5.0]]
        {
            let servers = servers(weights);
            let mut remote = connect_all(&addresses(&servers));
            assert_eq!(
                run_step(&mut remote, 1, rows).unwrap(),
                expected,
                "{weights:?}, {rows} rows"
            );
        }
    }
}

#[test]
fn hints_go_only_to_workers_that_want_them() {
    let (asks, plain) = (Meddler::start("asks", Fault::WantsHints), WorkerServer::start("plain"));
    let mut remote = connect_all(&[asks.address(), plain.address()]);
    assert_eq!([0, 1].map(|worker| remote.wants_hints(worker)), [true, false]);
    let (layer, experts) = *moe_layers().last().unwrap();
    let owned = (0..experts).filter(|&expert| remote.owner(layer, expert) == Some(0));
    let (epoch, generation) = remote.fence_base();
    let fence = Fence { epoch, generation, step: 1, ..Fence::default() };
    let owned: Vec<u32> = owned.collect();
    for experts in [owned, vec![experts]] {
        let hint = PrefetchHint { fence: Some(fence), layer, experts, checksum: 0 };
        remote.hint(0, hint);
    }
    assert_eq!(run_step(&mut remote, 1, 5).unwrap(), expected_sums(5), "no byte differs");
    let seen = asks.core.counters().snapshot();
    assert_eq!((seen.hints_taken, seen.hints_malformed), (1, 1), "before the work");
}

#[test]
fn sixteen_workers_and_more_workers_than_experts() {
    let servers = servers(&[1.0; 16]);
    let mut remote = connect_all(&addresses(&servers));
    let expected = expected_sums(3);
    for step in 1..4 {
        assert_eq!(run_step(&mut remote, step, 3).unwrap(), expected);
    }
    let (layers, most) = (moe_layers(), moe_layers().iter().map(|&(_, n)| n).max().unwrap());
    assert!(most <= 16, "a layer has at most as many experts as there are workers");
    let used: BTreeSet<usize> = owners(&remote).into_iter().collect();
    assert!(used.len() > 8, "{layers:?} spread over {used:?}");
}

#[test]
fn two_coordinators_share_one_worker() {
    let servers = servers(&[1.0, 1.0]);
    let mut one = connect_all(&addresses(&servers));
    // The other coordinator has one of the workers alone, so it assigns it everything.
    let mut two = connect_all(&addresses(&servers[..1]));
    let expected = expected_sums(4);
    for step in 1..6 {
        assert_eq!(run_step(&mut one, step, 4).unwrap(), expected);
        assert_eq!(run_step(&mut two, step, 4).unwrap(), expected);
    }
    drop(one);
    assert_eq!(run_step(&mut two, 9, 4).unwrap(), expected);
    assert_eq!(servers[0].core.counters().snapshot().sessions, 2);
}

#[test]
fn the_worker_listens_again_when_its_coordinator_leaves() {
    let servers = servers(&[1.0]);
    let expected = expected_sums(2);
    for round in 1..4 {
        let mut remote = connect_all(&addresses(&servers));
        assert_eq!(run_step(&mut remote, 1, 2).unwrap(), expected);
        drop(remote);
        assert_eq!(servers[0].core.counters().snapshot().sessions, round);
    }
}

#[test]
fn a_worker_that_restarts_serves_again() {
    let stays = WorkerServer::start("w0");
    // It ends without a farewell, so its experts are kept for it.
    let killed = Meddler::start("w1", Fault::WantsHints);
    let port: u16 = killed.address().rsplit_once(':').unwrap().1.parse().unwrap();
    let mut remote = connect_all(&[stays.address(), killed.address()]);
    let expected = expected_sums(2);
    assert_eq!(run_step(&mut remote, 1, 2).unwrap(), expected);
    let placed = owners(&remote);
    drop(killed);
    wait_until("the loss to be seen", SOON, || remote.standing(1) == Standing::Away);
    assert!(remote.status().borrow().complete, "the other one can stand in");
    let (worker, detail) = match run_step(&mut remote, 2, 2) {
        Err(TransportError::Lost { worker, detail }) => (worker, detail),
        // No live owner: the step was not begun.
        Err(TransportError::Closed) => (1, "w1".to_owned()),
        other => panic!("a step without a worker: {other:?}"),
    };
    assert_eq!(worker, 1);
    assert!(detail.contains("w1"), "{detail}");
    let core = bench::core(bench::container(), "w1", 1.0);
    let _back = WorkerServer::with(core, port, ServeConfig::default());
    wait_complete(&remote);
    assert_eq!(run_step(&mut remote, 3, 2).unwrap(), expected);
    assert_eq!(owners(&remote), placed, "nothing moved");
}

#[test]
fn a_worker_that_comes_back_as_another_one_is_placed_anew() {
    let mut servers = servers(&[1.0, 1.0]);
    let timings = Timings { replace_after: Duration::from_millis(200), ..quick().timings };
    let mut remote = connect(RemoteConfig { timings, ..quick() }, &addresses(&servers));
    wait_complete(&remote);
    remote.between_steps();
    let (_, before) = remote.fence_base();
    let gone = servers.remove(1);
    let port = gone.port;
    drop(gone);
    let core = bench::core(bench::container(), "bigger", 8.0);
    servers.push(WorkerServer::with(core, port, ServeConfig::default()));
    let mostly_its = |remote: &RemoteWorkers| {
        let owners = owners(remote);
        owners.iter().filter(|&&owner| owner == 1).count() > owners.len() / 2
    };
    wait_until("a new placement", SOON, || {
        remote.between_steps();
        let status = remote.status().borrow().clone();
        let id = &status.workers[1].worker_id;
        remote.fence_base().1 > before && id == "bigger" && mostly_its(&remote)
    });
    assert_eq!(run_step(&mut remote, 1, 2).unwrap(), expected_sums(2));
}

#[test]
fn a_hanging_worker_costs_its_deadline_and_no_more() {
    let meddler = Meddler::start("w", Fault::Stalls);
    let config = RemoteConfig {
        layer_floor: Duration::from_millis(100),
        layer_ceiling: Duration::from_millis(300),
        ..quick()
    };
    let mut remote = connect(config, &[meddler.address()]);
    wait_complete(&remote);
    let begun = Instant::now();
    let (worker, detail) = lost(&mut remote, 1);
    assert_eq!(worker, 0);
    assert!(
        detail.contains("worker w (127.0.0.1:") && detail.contains("no answer for layer"),
        "{detail}"
    );
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert!(begun.elapsed() < SOON / 2);
    meddler.mend();
    wait_complete(&remote);
    let sums = wait_for("a step after the reconnect", SOON, || run_step(&mut remote, 2, 2).ok());
    assert_eq!(sums, expected_sums(2));
}

/// Work for the first expert that a worker holds.
fn owed(remote: &RemoteWorkers, worker: usize, step: u64) -> ExpertWork {
    let (epoch, generation) = remote.fence_base();
    let (layer, experts) = moe_layers()[0];
    let fence = Fence { epoch, generation, step, layer, attempt: 0, part: 0 };
    let expert = (0..experts).find(|&e| remote.copies(layer, e).contains(&worker)).unwrap();
    bench::work(fence, &[expert], 1, 1)
}

#[test]
fn a_late_worker_that_is_alive_is_suspect_until_it_answers() {
    let meddler = Meddler::start("w", Fault::Withholds);
    let ms = Duration::from_millis;
    let config = RemoteConfig {
        probe_after: ms(20),
        probe_interval: ms(20),
        layer_floor: ms(50),
        ..quick()
    };
    let mut remote = connect(config, &[meddler.address()]);
    wait_complete(&remote);
    remote.between_steps();
    remote.send(0, owed(&remote, 0, 1)).unwrap();
    // The step has waited long enough and goes on without it.
    assert_eq!(remote.receive(Instant::now() + ms(10)).unwrap_err(), TransportError::Timeout);
    remote.suspect(0);
    assert_eq!(remote.standing(0), Standing::Suspect);
    wait_told(&remote, 0, "suspect", "asked whether it is alive");
    wait_until("it to be asked again and again", SOON, || remote.counters().probes > 3);
    assert_eq!(remote.receive(Instant::now() + ms(200)).unwrap_err(), TransportError::Timeout);
    assert_eq!((remote.counters().losses, remote.counters().failed_probes), (0, 0), "it answers");
    meddler.mend();
    let reply = remote.receive(Instant::now() + SOON).unwrap();
    assert!(reply.worker == 0 && reply.outcome.is_ok());
    assert_eq!(remote.standing(0), Standing::Serving);
    wait_told(&remote, 0, "serving", "");
    assert_eq!(run_step(&mut remote, 2, 2).unwrap(), expected_sums(2));
}

#[test]
fn a_worker_that_lives_but_never_answers_gets_a_new_session() {
    let meddler = Meddler::start("w", Fault::Stalls);
    let ms = Duration::from_millis;
    let config = RemoteConfig { probe_interval: ms(20), suspect_patience: ms(100), ..quick() };
    let mut remote = connect(config, &[meddler.address()]);
    wait_complete(&remote);
    remote.between_steps();
    remote.send(0, owed(&remote, 0, 1)).unwrap();
    remote.suspect(0);
    match remote.receive(Instant::now() + SOON) {
        Err(TransportError::Lost { worker: 0, detail }) => {
            assert!(detail.contains("answers health probes but owes an answer"), "{detail}");
        }
        other => panic!("expected a loss, got {other:?}"),
    }
    meddler.mend();
    wait_complete(&remote);
}

#[test]
fn a_worker_whose_port_is_closed_to_probes_is_dead() {
    // A proxy that takes one connection and no more: what a host that is cut off looks like.
    let server = WorkerServer::start("w");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let theirs = server.address();
    let proxy = std::thread::spawn(move || {
        let (near, _) = listener.accept().unwrap();
        drop(listener);
        let far = std::net::TcpStream::connect(theirs).unwrap();
        let carry = |mut from: std::net::TcpStream, mut to: std::net::TcpStream| {
            // Ends with the connection.
            let _over = std::io::copy(&mut from, &mut to);
            let _closed = to.shutdown(std::net::Shutdown::Both);
        };
        std::thread::scope(|scope| {
            let (from, to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            scope.spawn(move || carry(from, to));
            carry(far, near);
        });
    });
    let ms = Duration::from_millis;
    let config = RemoteConfig { probe_interval: ms(20), ..quick() };
    let mut remote = connect(config, &[address]);
    wait_complete(&remote);
    remote.between_steps();
    assert_eq!(run_step(&mut remote, 1, 2).unwrap(), expected_sums(2));
    remote.suspect(0);
    // What the worker is said to be soon tells of the vain new connection instead.
    wait_until("two probes to fail", SOON, || remote.counters().failed_probes == 2);
    wait_until("the loss to be seen", SOON, || remote.standing(0) == Standing::Away);
    drop(remote);
    proxy.join().unwrap();
}

#[test]
fn survivors_adopt_the_experts_of_who_is_gone() {
    let stays = WorkerServer::start("w0");
    let killed = Meddler::start("w1", Fault::WantsHints);
    let mut remote = connect_all(&[stays.address(), killed.address()]);
    let (layer, experts) = moe_layers()[0];
    let gone: Vec<u32> = (0..experts).filter(|&e| remote.copies(layer, e) == [1]).collect();
    assert!(!gone.is_empty());
    drop(killed);
    wait_until("the loss to be seen", SOON, || remote.standing(1) == Standing::Away);
    assert_eq!(remote.standing(1), Standing::Away);
    assert_eq!(remote.stand_ins(layer), [0]);
    for step in 1..4 {
        // The second time it is not told again.
        let told = if step == 1 { gone.len() } else { 0 };
        assert_eq!(remote.adopt(0, layer, &gone).unwrap(), told);
        let (epoch, generation) = remote.fence_base();
        let fence = Fence { epoch, generation, step, layer, attempt: 0, part: 0 };
        let work = bench::work(fence, &gone, 3, 9);
        remote.send(0, work.clone()).unwrap();
        let result = remote.receive(Instant::now() + SOON).unwrap().outcome.unwrap();
        let hidden = bench::container().config().hidden_size;
        let (mut found, mut expected) = (vec![0; 3 * hidden], vec![0; 3 * hidden]);
        bench::combine(&work, &result, &mut found);
        let mut local = bench::local_session();
        let fence = Fence { epoch: 1, generation: 1, step, layer, attempt: 0, part: 0 };
        let own = bench::work(fence, &gone, 3, 9);
        bench::combine(&own, &local.work(&own).unwrap(), &mut expected);
        assert_eq!(found, expected);
    }
    let other = (0..experts).find(|expert| !gone.contains(expert)).unwrap();
    assert!(remote.adopt(1, layer, &[other]).is_err(), "it is gone");
}

#[test]
fn the_callers_deadline_comes_first() {
    let meddler = Meddler::start("w", Fault::Stalls);
    let mut remote = connect_all(&[meddler.address()]);
    let (epoch, generation) = remote.fence_base();
    let (layer, _) = moe_layers()[0];
    let fence =
        shimmer_proto::expert::v1::Fence { epoch, generation, step: 1, layer, attempt: 0, part: 0 };
    remote.send(0, bench::work(fence, &[0], 1, 1)).unwrap();
    let deadline = Instant::now() + Duration::from_millis(50);
    assert_eq!(remote.receive(deadline).unwrap_err(), TransportError::Timeout);
    remote.give_up(0, "the step's deadline passed");
    wait_until("the session to be renewed", SOON, || remote.counters().losses > 0);
    wait_complete(&remote);
}

#[test]
fn a_damaged_result_never_enters_a_sum() {
    let meddler = Meddler::start("w", Fault::FlippedBit);
    let mut remote = connect_all(&[meddler.address()]);
    let (_, detail) = lost(&mut remote, 1);
    assert!(detail.contains("a damaged result: checksum"), "{detail}");
    assert_eq!(remote.counters().corrupt_frames, 1);
    meddler.mend();
    wait_until("the worker to be back", SOON, || {
        remote.counters().connects > 1 && remote.status().borrow().complete
    });
    assert_eq!(run_step(&mut remote, 2, 2).unwrap(), expected_sums(2));
}

#[test]
fn oversized_results_and_closed_streams_are_losses() {
    for (fault, text) in
        [(Fault::Oversized, "the connection broke"), (Fault::HangsUp, "ended the stream")]
    {
        let meddler = Meddler::start("w", fault);
        let mut remote = connect_all(&[meddler.address()]);
        let (_, detail) = lost(&mut remote, 1);
        assert!(detail.contains(text), "{detail}");
    }
}

#[test]
fn late_duplicate_and_foreign_replies_are_dropped_and_counted() {
    let meddler = Meddler::start("w", Fault::Repeats);
    let mut remote = connect_all(&[meddler.address()]);
    let expected = expected_sums(3);
    for step in 1..4 {
        assert_eq!(run_step(&mut remote, step, 3).unwrap(), expected);
    }
    let dropped = remote.counters().dropped;
    assert!(dropped.stale > 0 && dropped.unknown > 0, "{dropped:?}");
    assert!(dropped.duplicate + dropped.stale > 3, "{dropped:?}");
}

#[test]
fn a_load_without_progress_is_given_up() {
    let meddler = Meddler::start("w", Fault::NeverReady);
    let config = RemoteConfig { load_stall_timeout: Duration::from_millis(100), ..quick() };
    let remote = connect(config, &[meddler.address()]);
    wait_until("the load to be given up", SOON, || remote.counters().losses > 1);
    meddler.mend();
    wait_complete(&remote);
}

#[test]
fn unreachable_workers_are_told_and_tried_again() {
    let port = {
        let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        probe.local_addr().unwrap().port()
    };
    let servers = servers(&[1.0]);
    let both = [servers[0].address(), format!("127.0.0.1:{port}")];
    let timings = Timings { placement_wait: Duration::from_millis(300), ..quick().timings };
    let mut remote = connect(RemoteConfig { timings, ..quick() }, &both);
    wait_told(&remote, 1, "connecting", "connecting to 127.0.0.1");
    wait_until("a placement without the absent one", SOON, || remote.status().borrow().complete);
    let expected = expected_sums(3);
    assert_eq!(run_step(&mut remote, 1, 3).unwrap(), expected);
    assert_eq!(remote.fence_base().1, 1);
    let core = bench::core(bench::container(), "late", 1.0);
    let _late = WorkerServer::with(core, port, ServeConfig::default());
    let mut step = 1;
    wait_until("the late one to take load", SOON, || {
        step += 1;
        assert_eq!(run_step(&mut remote, step, 3).unwrap(), expected);
        remote.fence_base().1 == 2 && owners(&remote).contains(&1)
    });
}

#[test]
fn something_else_on_the_port_is_refused_by_name() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (_, health) = tonic_health::server::health_reporter();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server =
        tonic::transport::Server::builder().add_service(health).serve_with_incoming(incoming);
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn_on(server, runtime.handle());
    let remote = connect(quick(), &[address]);
    wait_told(&remote, 0, "refused", "no expert service");
}

#[test]
fn workers_report_health() {
    use tonic_health::pb::{
        HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
    };
    let server = WorkerServer::start("w");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let status = runtime.block_on(async {
        let endpoint =
            shimmer_proto::channel::endpoint(&server.address().parse().unwrap()).unwrap();
        let mut client = HealthClient::new(endpoint.connect().await.unwrap());
        let request = HealthCheckRequest { service: "shimmer.expert.v1.ExpertService".to_owned() };
        client.check(request).await.unwrap().into_inner().status()
    });
    assert_eq!(status, ServingStatus::Serving);
}

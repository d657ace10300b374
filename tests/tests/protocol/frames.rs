//! Frames that are too large, cut off, damaged, out of date or nonsense: refused, counted, and the worker lives on.

use std::{
    io::Write as _,
    net::TcpStream,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use prost::Message as _;
use shimmer_proto::{
    checksum,
    expert::v1::{
        ErrorCode, ExpertWork, Fence, LayerExperts, PrefetchHint, SessionRequest,
        session_request::Body as Ask, session_response::Body as Said,
    },
    limits,
};
use shimmer_tests::wait::wait_until;
use shimmer_worker::ServeConfig;

use super::{
    bench::{self, SOON, WorkerServer, moe_layers},
    raw::{EPOCH, GENERATION, RawClient, hello, http2_call, read_to_close},
};

fn fence() -> Fence {
    Fence {
        epoch: EPOCH,
        generation: GENERATION,
        step: 1,
        layer: moe_layers()[0].0,
        attempt: 0,
        part: 0,
    }
}

fn good_work() -> ExpertWork {
    bench::work(fence(), &[0, 2, 5], 4, 9)
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Work is refused with a code and a text, the named counter grows by one, and the stream still works.
fn check_work(
    server: &WorkerServer,
    client: &mut RawClient,
    counter: &AtomicU64,
    change: impl FnOnce(&mut ExpertWork),
    expected: (ErrorCode, &str),
) {
    let before = count(counter);
    let mut work = good_work();
    change(&mut work);
    if expected.0 != ErrorCode::Checksum {
        checksum::seal_work(&mut work);
    }
    client.ask(Ask::Work(work));
    let error = client.refused();
    assert_eq!(error.code(), expected.0, "{}", error.detail);
    assert!(error.detail.contains(expected.1), "{:?} should say {:?}", error.detail, expected.1);
    assert!(!error.fatal);
    assert_eq!(count(counter), before + 1, "{}", error.detail);
    assert!(client.works(good_work()), "the stream goes on");
    assert_eq!(server.core.counters().snapshot().frames_malformed, 0);
}

#[test]
fn damaged_stale_and_impossible_work_is_refused_and_counted() {
    let server = WorkerServer::start("w");
    let client = &mut RawClient::assigned(&server);
    let counters = server.counters();
    let mut check = |counter, change: &dyn Fn(&mut ExpertWork), code, text| {
        check_work(&server, client, counter, change, (code, text));
    };
    let flip = |work: &mut ExpertWork, at: usize| {
        let mut rows = work.rows.to_vec();
        rows[at] ^= 0x10;
        work.rows = rows.into();
    };
    check(&counters.frames_corrupt, &|w| flip(w, 17), ErrorCode::Checksum, "checksum");
    check(&counters.frames_corrupt, &|w| w.gates[1] += 0.5, ErrorCode::Checksum, "checksum");
    check(&counters.frames_corrupt, &|w| w.checksum ^= 1, ErrorCode::Checksum, "checksum");

    let fenced =
        |change: fn(&mut Fence)| move |w: &mut ExpertWork| change(w.fence.as_mut().unwrap());
    let stale = "this session is at epoch 77, generation 3";
    check(&counters.work_stale, &fenced(|f| f.epoch -= 1), ErrorCode::StaleFence, stale);
    check(&counters.work_stale, &fenced(|f| f.generation -= 1), ErrorCode::StaleFence, stale);
    check(&counters.work_stale, &fenced(|f| f.generation += 1), ErrorCode::StaleFence, stale);

    let bad = &counters.work_malformed;
    let malformed = ErrorCode::Malformed;
    check(bad, &|w| w.fence = None, malformed, "no fence");
    check(bad, &fenced(|f| f.layer = 99), malformed, "layer 99 has no routed experts");
    check(bad, &|w| w.format = 1, malformed, "this container takes");
    check(bad, &|w| w.format = 77, malformed, "this container takes");
    check(bad, &|w| w.row_count = 0, malformed, "0 rows");
    check(bad, &|w| w.row_count = 5000, malformed, "5000 rows");
    check(bad, &|w| w.row_count = u32::MAX, malformed, "rows");
    check(bad, &|w| w.row_count = 5, malformed, "5 rows take");
    check(bad, &|w| w.rows = w.rows.slice(1..), malformed, "found");
    check(bad, &|w| w.experts.clear(), malformed, "0 experts");
    check(bad, &|w| w.experts.push(1), malformed, "4 experts and 3 row counts");
    check(bad, &|w| w.item_rows[0] = u32::MAX, malformed, "pairs announced");
    check(bad, &|w| w.gates.truncate(1), malformed, "gates");
    check(bad, &|w| w.row_indices[0] = 4, malformed, "row index 4 in work of 4 rows");
    check(bad, &|w| w.gates[0] = f32::NAN, malformed, "a gate of NaN");
    check(bad, &|w| w.gates[0] = f32::INFINITY, malformed, "a gate of inf");
    check(bad, &|w| w.experts[1] = 1000, malformed, "expert 1000 of layer");
    check(bad, &|w| w.experts[1] = w.experts[0], malformed, "twice");
    check(
        &counters.work_overflowed,
        &|w| w.gates[2] = 1e30,
        ErrorCode::Overflow,
        "not finite or at least 2^21",
    );
    assert_eq!(counters.snapshot().sessions, 1);
}

#[test]
fn overflow_names_the_rows_so_that_others_can_go_on() {
    let server = WorkerServer::start("w");
    let client = &mut RawClient::assigned(&server);
    for experts in [&[2][..], &[0, 2, 5]] {
        // One expert answers with outputs, three with sums; both check the range.
        let mut work = bench::work(fence(), experts, 4, 9);
        let at = work.row_indices.iter().rposition(|&row| row == 2).unwrap();
        work.gates[at] = 1e30;
        checksum::seal_work(&mut work);
        client.ask(Ask::Work(work));
        let error = client.refused();
        assert_eq!((error.code(), &error.rows[..]), (ErrorCode::Overflow, &[2][..]), "{experts:?}");
    }
}

#[test]
fn experts_that_are_not_assigned_are_refused() {
    let server = WorkerServer::start("w");
    let mut client = RawClient::greeted(&server);
    client.ask(Ask::Work(good_work()));
    assert_eq!(client.refused().code(), ErrorCode::Protocol, "work before an assignment");
    let mut assign = bench::assign_all(EPOCH, GENERATION);
    assign.layers[0].experts.retain(|&expert| expert != 2);
    client.assign(assign).unwrap();
    client.ask(Ask::Work(good_work()));
    let error = client.refused();
    assert_eq!((error.code(), error.expert), (ErrorCode::NotOwned, Some(2)));
    assert_eq!(count(&server.counters().work_not_owned), 1);
}

#[test]
fn impossible_assignments_are_refused_by_name() {
    let server = WorkerServer::start("w");
    let mut client = RawClient::greeted(&server);
    let layer = moe_layers()[0].0;
    let mut check = |layers: Vec<LayerExperts>, code, text: &str| {
        let assign = shimmer_proto::expert::v1::Assign { epoch: 1, generation: 1, layers };
        let error = client.assign(assign).unwrap_err();
        assert_eq!(error.code(), code);
        assert!(error.detail.contains(text), "{}", error.detail);
    };
    let of = |layer, experts: &[u32]| LayerExperts { layer, experts: experts.to_vec() };
    check(vec![of(500, &[0])], ErrorCode::Malformed, "layer 500 has no routed experts");
    check(vec![of(layer, &[1, 0])], ErrorCode::Malformed, "not ascending");
    check(vec![of(layer, &[1, 1])], ErrorCode::Malformed, "not ascending");
    check(vec![of(layer, &[0, 4_000_000_000])], ErrorCode::Malformed, "expert 4000000000");
    check(vec![of(layer, &[0]), of(layer, &[1])], ErrorCode::Malformed, "layers of an assignment");
    assert!(client.assign(bench::assign_all(EPOCH, GENERATION)).is_ok());
    assert!(client.works(good_work()));
}

#[test]
fn a_flipped_bit_anywhere_never_passes_as_another_result() {
    let server = WorkerServer::start("w");
    let mut client = RawClient::assigned(&server);
    let encoded = SessionRequest { body: Some(Ask::Work(good_work())) }.encode_to_vec();
    client.send(encoded.clone());
    let Ok(Some(Said::Result(good))) = client.hear() else { panic!("good work has a result") };
    for at in (0..encoded.len()).step_by(encoded.len() / 97 + 1) {
        let mut damaged = encoded.clone();
        damaged[at] ^= 1 << (at % 8);
        client.send(damaged);
        match client.hear() {
            Ok(Some(Said::Result(result))) => assert_eq!(result.payload, good.payload, "byte {at}"),
            Ok(Some(Said::Error(error))) if !error.fatal => {}
            // The encoding was hit: the stream is over, the worker is not.
            _ => client = RawClient::assigned(&server),
        }
    }
    let seen = server.counters().snapshot();
    assert!(seen.frames_corrupt > 50, "{seen:?}");
}

/// Good work in a message of so many bytes: a field that this build does not know fills it up.
fn padded(bytes: usize) -> Vec<u8> {
    let mut message = SessionRequest { body: Some(Ask::Work(good_work())) }.encode_to_vec();
    // Field 100 of the request, bytes: skipped by this build.
    let header = [0xa2, 0x06];
    let rest = bytes - message.len() - header.len();
    let mut length = Vec::new();
    prost::encoding::encode_varint(u64::try_from(rest - 3).unwrap(), &mut length);
    assert_eq!(length.len(), 3);
    message.extend(header);
    message.extend(length);
    message.resize(bytes, 0);
    message
}

#[test]
fn the_announced_size_is_read_and_no_byte_more() {
    let server = WorkerServer::start("w");
    let announced = server.core.hello().limits.unwrap().max_message_bytes;
    let announced = usize::try_from(announced).unwrap();
    assert!(announced < limits::MAX_MESSAGE_BYTES, "memory is kept for no more than it takes");
    let mut client = RawClient::assigned(&server);
    client.send(padded(announced));
    let heard = client.hear();
    assert!(matches!(heard, Ok(Some(Said::Result(_)))), "{heard:?}");
    for (refused, bytes) in [(1, announced + 1), (2, limits::MAX_MESSAGE_BYTES + 1)] {
        let mut client = RawClient::assigned(&server);
        client.send(vec![0; bytes]);
        let error = client.refused();
        assert_eq!(error.code(), ErrorCode::Oversized);
        assert!(error.fatal);
        assert!(matches!(client.hear(), Ok(None)));
        assert_eq!(count(&server.counters().frames_oversized), refused);
    }
    assert!(client.works(good_work()), "of another coordinator");
}

#[test]
fn unreadable_messages_end_the_stream_and_nothing_else() {
    let server = WorkerServer::start("w");
    let good = SessionRequest { body: Some(Ask::Work(good_work())) }.encode_to_vec();
    for garbage in [good[..good.len() - 3].to_vec(), vec![0xff; 40], b"GET / HTTP/1.1\r\n".to_vec()]
    {
        let before = count(&server.counters().frames_malformed);
        let mut client = RawClient::assigned(&server);
        client.send(garbage);
        let error = client.refused();
        assert_eq!((error.code(), error.fatal), (ErrorCode::Malformed, true));
        assert_eq!(count(&server.counters().frames_malformed), before + 1);
    }
    let mut client = RawClient::assigned(&server);
    client.send(Vec::new());
    assert_eq!(client.refused().code(), ErrorCode::Protocol, "an empty message has no body");
    let mut client = RawClient::assigned(&server);
    client.ask(Ask::Hello(hello(server.core.identity())));
    assert_eq!(client.refused().code(), ErrorCode::Protocol, "a second hello");
    let mut client = RawClient::open(&server);
    client.ask(Ask::Work(good_work()));
    assert_eq!(client.refused().code(), ErrorCode::Protocol, "work before a hello");
    let mut client = RawClient::open(&server);
    client.ask(Ask::Hint(PrefetchHint::default()));
    assert_eq!(client.refused().code(), ErrorCode::Protocol, "a hint before a hello");
    assert!(RawClient::assigned(&server).works(good_work()));
}

#[test]
fn hints_have_no_answer_and_never_end_a_stream() {
    let server = WorkerServer::start("w");
    let mut client = RawClient::greeted(&server);
    let mut good = PrefetchHint {
        fence: Some(Fence { layer: 0, ..fence() }),
        layer: moe_layers()[0].0,
        experts: vec![2, 0],
        checksum: 0,
    };
    checksum::seal_hint(&mut good);
    let many = PrefetchHint { experts: vec![0; 1 << 15], ..good.clone() };
    let damaged = PrefetchHint { experts: vec![2, 1], ..good.clone() };
    client.ask(Ask::Hint(good.clone()));
    client.assign(bench::assign_all(EPOCH, GENERATION)).unwrap();
    for hint in [damaged, many, PrefetchHint::default(), good] {
        client.ask(Ask::Hint(hint));
        assert!(client.works(good_work()), "the stream goes on");
    }
    let seen = server.counters().snapshot();
    let hints = (seen.hints_taken, seen.hints_corrupt, seen.hints_malformed, seen.hints_stale);
    assert_eq!(hints, (1, 1, 2, 1), "early ones are stale");
}

#[test]
fn frames_that_are_cut_off_are_counted() {
    let config =
        ServeConfig { drain_timeout: Duration::from_millis(200), ..ServeConfig::default() };
    let server = WorkerServer::with(bench::core(bench::container(), "w", 1.0), 0, config);
    // A gRPC frame that announces 100 bytes and ends after 10.
    let mut data = vec![0, 0, 0, 0, 100];
    data.extend([1; 10]);
    let mut socket = http2_call(&server, &data, true);
    wait_until("the cut frame to be counted", SOON, || {
        count(&server.counters().frames_malformed) == 1
    });
    drop(http2_call(&server, &data, false));
    // A gRPC frame that announces 4 GiB.
    let _huge = http2_call(&server, &[0, 0xff, 0xff, 0xff, 0xff, 1, 2, 3], false);
    wait_until("the huge frame to be counted", SOON, || {
        count(&server.counters().frames_oversized) == 1
    });
    assert!(RawClient::assigned(&server).works(good_work()));
    drop(server);
    assert!(read_to_close(&mut socket) > 0);
}

#[test]
fn garbage_on_the_port_harms_nobody() {
    let server = WorkerServer::start("w");
    let mut client = RawClient::assigned(&server);
    for garbage in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &[0x16, 3, 1, 2, 0, 1, 0],
        &[0; 512],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nxxxxxxxxxxxx",
    ] {
        let mut socket = TcpStream::connect(server.address()).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        socket.write_all(garbage).unwrap();
        // A server that has thrown the garbage out already leaves nothing to close.
        match socket.shutdown(std::net::Shutdown::Write) {
            Err(error) if error.kind() == std::io::ErrorKind::NotConnected => {}
            closed => closed.unwrap(),
        }
        read_to_close(&mut socket);
        assert!(client.works(good_work()));
    }
}

#[test]
fn silent_clients_are_thrown_out_and_hold_nothing() {
    let config = ServeConfig {
        hello_timeout: Duration::from_millis(150),
        max_connections: 3,
        ..ServeConfig::default()
    };
    let server = WorkerServer::with(bench::core(bench::container(), "w", 1.0), 0, config);
    let mut silent = TcpStream::connect(server.address()).unwrap();
    silent.set_read_timeout(Some(SOON)).unwrap();
    let mut client = RawClient::assigned(&server);
    assert!(client.works(good_work()), "a silent client does not hold the port");
    read_to_close(&mut silent);
    // It is counted once its socket is closed.
    wait_until("the silent client to be counted", SOON, || {
        count(&server.counters().connections_silent) == 1
    });

    let mut mute = RawClient::open(&server);
    let error = mute.refused();
    assert_eq!((error.code(), error.fatal), (ErrorCode::Protocol, true));
    assert!(error.detail.contains("no hello within 150 ms"));
    assert!(client.works(good_work()), "a greeted client may be idle");
    drop(mute);

    wait_until("the limit of connections to be hit", SOON, || {
        drop(TcpStream::connect(server.address()).map(|_open| {
            std::iter::repeat_with(|| TcpStream::connect(server.address()))
                .take(4)
                .collect::<Vec<_>>()
        }));
        count(&server.counters().connections_refused) > 0
    });
    assert!(client.works(good_work()));
}

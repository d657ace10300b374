//! Clients that say exactly what a test wants: typed messages, encoded messages of any bytes, and bare HTTP/2 frames.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
};

use bytes::{BufMut as _, Bytes};
use shimmer_proto::{
    channel,
    expert::v1::{
        Assign, CoordinatorHello, ExpertWork, Identity, SessionRequest, SessionResponse,
        WorkerError, session_request::Body as Ask, session_response::Body as Said,
    },
    limits,
};
use tokio::{runtime::Runtime, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codec::{Codec, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
};
use tonic_prost::{ProstCodec, ProstDecoder};

use super::bench::{SOON, WorkerServer, assign_all};

pub(super) const EPOCH: u64 = 77;
pub(super) const GENERATION: u64 = 3;

/// Sends encoded messages as they are.
#[derive(Debug, Default)]
struct RawCodec;

struct RawEncoder;

impl Encoder for RawEncoder {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Codec for RawCodec {
    type Encode = Bytes;
    type Decode = SessionResponse;
    type Encoder = RawEncoder;
    type Decoder = ProstDecoder<SessionResponse>;

    fn encoder(&mut self) -> RawEncoder {
        RawEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<SessionResponse, SessionResponse>::default().decoder()
    }
}

/// A hand-driven stream to a worker. It has no limit on what it sends.
pub(super) struct RawClient {
    runtime: Runtime,
    requests: mpsc::Sender<Bytes>,
    answers: Streaming<SessionResponse>,
}

impl RawClient {
    /// Opens a stream and says nothing.
    pub(super) fn open(server: &WorkerServer) -> Self {
        Self::open_at(&server.address())
    }

    /// As [`Self::open`], to whoever listens there.
    pub(super) fn open_at(address: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (requests, queue) = mpsc::channel(64);
        let answers = runtime.block_on(async {
            let endpoint = channel::endpoint(&address.parse().unwrap()).unwrap();
            let mut grpc = Grpc::new(endpoint.connect().await.unwrap());
            grpc.ready().await.unwrap();
            let path = PathAndQuery::from_static("/shimmer.expert.v1.ExpertService/Session");
            grpc.streaming(Request::new(ReceiverStream::new(queue)), path, RawCodec)
                .await
                .unwrap()
                .into_inner()
        });
        Self { runtime, requests, answers }
    }

    /// Opens a stream that the worker has greeted.
    pub(super) fn greeted(server: &WorkerServer) -> Self {
        let mut client = Self::open(server);
        client.ask(Ask::Hello(hello(server.core.identity())));
        assert!(matches!(client.hear(), Ok(Some(Said::Hello(_)))));
        client
    }

    /// Opens a stream that owns every expert of the worker.
    pub(super) fn assigned(server: &WorkerServer) -> Self {
        let mut client = Self::greeted(server);
        client.assign(assign_all(EPOCH, GENERATION)).unwrap();
        client
    }

    pub(super) fn assign(&mut self, assign: Assign) -> Result<(), WorkerError> {
        self.ask(Ask::Assign(assign));
        loop {
            match self.hear().unwrap().unwrap() {
                Said::Progress(_) => {}
                Said::Ready(_) => return Ok(()),
                Said::Error(error) => return Err(error),
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    pub(super) fn ask(&mut self, body: Ask) {
        self.send(prost::Message::encode_to_vec(&SessionRequest { body: Some(body) }));
    }

    pub(super) fn send(&mut self, message: impl Into<Bytes>) {
        // A worker that has ended the stream does not take more; the test then hears why.
        drop(self.runtime.block_on(self.requests.send(message.into())));
    }

    /// The next answer; none at the end of the stream.
    pub(super) fn hear(&mut self) -> Result<Option<Said>, Status> {
        let next = async { tokio::time::timeout(SOON, self.answers.message()).await };
        let answer = self.runtime.block_on(next).expect("an answer in time")?;
        Ok(answer.map(|answer| answer.body.unwrap()))
    }

    /// The next answer, which must be an error.
    pub(super) fn refused(&mut self) -> WorkerError {
        match self.hear() {
            Ok(Some(Said::Error(error))) => error,
            other => panic!("expected a refusal, heard {other:?}"),
        }
    }

    /// Whether work gets a result.
    pub(super) fn works(&mut self, work: ExpertWork) -> bool {
        self.ask(Ask::Work(work));
        matches!(self.hear(), Ok(Some(Said::Result(_))))
    }
}

/// A hello of this build.
pub(super) fn hello(identity: Identity) -> CoordinatorHello {
    CoordinatorHello {
        identity: Some(identity),
        limits: Some(limits::announced()),
        coordinator_id: "raw".to_owned(),
    }
}

/// A connection that speaks HTTP/2 by hand: preface, settings, the headers of a call, then DATA with these bytes.
pub(super) fn http2_call(server: &WorkerServer, data: &[u8], end_stream: bool) -> TcpStream {
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    frame(&mut bytes, 4, 0, 0, &[]);
    let mut headers = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/shimmer.expert.v1.ExpertService/Session"),
        (":authority", "worker"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        // A literal header field without indexing, both strings plain.
        headers.push(0);
        for text in [name, value] {
            headers.push(u8::try_from(text.len()).unwrap());
            headers.extend(text.as_bytes());
        }
    }
    frame(&mut bytes, 1, 4, 1, &headers);
    frame(&mut bytes, 0, u8::from(end_stream), 1, data);
    socket.write_all(&bytes).unwrap();
    socket
}

fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap();
    out.extend(&length.to_be_bytes()[1..]);
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
}

/// Reads until the other end closes.
pub(super) fn read_to_close(socket: &mut TcpStream) -> usize {
    let mut total = 0;
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return total,
            Ok(read) => total += read,
            // A reset closes as well.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return total,
            Err(error) => panic!("the worker did not close the connection: {error}"),
        }
    }
}

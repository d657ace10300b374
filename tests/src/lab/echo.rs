//! What a network gives at best: plain sockets that exchange messages of given sizes, with nothing in them.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

/// One message and its answer, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// Which server.
    pub server: usize,
    /// Length of the message.
    pub sent: usize,
    /// Length of the answer.
    pub answered: usize,
}

/// Length of message and answer, in front of each message.
const HEADER: usize = 16;

/// A server that reads whole messages and answers with as many bytes as it was asked for, one connection after the other.
///
/// # Errors
/// It cannot listen there.
pub fn serve(host: IpAddr) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((host, 0))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        while let Ok((socket, _)) = listener.accept() {
            drop(answer(socket)); // Ends when the client goes.
        }
    });
    Ok(address)
}

fn answer(mut socket: TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let (mut header, mut message) = ([0; HEADER], Vec::new());
    loop {
        socket.read_exact(&mut header)?;
        let length = |bytes: &[u8]| -> io::Result<usize> {
            let length = u64::from_le_bytes(bytes.try_into().map_err(io::Error::other)?);
            usize::try_from(length).map_err(io::Error::other)
        };
        let (sent, answered) = (length(&header[..8])?, length(&header[8..])?);
        message.resize(sent.max(answered), 0);
        socket.read_exact(&mut message[..sent])?;
        socket.write_all(&message[..answered])?;
    }
}

/// Runs rounds, each of which writes all its messages before it reads any answer, and returns the time of each.
///
/// # Errors
/// A server cannot be reached.
pub fn rounds(servers: &[SocketAddr], rounds: &[Vec<Exchange>]) -> io::Result<Vec<Duration>> {
    let mut sockets = Vec::new();
    for server in servers {
        let socket = TcpStream::connect(server)?;
        socket.set_nodelay(true)?;
        sockets.push(socket);
    }
    let mut bytes = Vec::new();
    let mut times = Vec::new();
    for round in rounds {
        let begun = Instant::now();
        for exchange in round {
            bytes.clear();
            bytes.extend((exchange.sent as u64).to_le_bytes());
            bytes.extend((exchange.answered as u64).to_le_bytes());
            bytes.resize(HEADER + exchange.sent, 0);
            sockets[exchange.server].write_all(&bytes)?;
        }
        for exchange in round {
            bytes.resize(exchange.answered, 0);
            sockets[exchange.server].read_exact(&mut bytes)?;
        }
        times.push(begun.elapsed());
    }
    Ok(times)
}

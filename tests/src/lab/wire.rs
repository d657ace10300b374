//! A connection with a hand in it: a proxy that delays what goes through, or flips a bit of a chosen frame.

use std::{
    fs,
    io::{self, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// What is read at a time.
const PIECE: usize = 256 * 1024;
/// Pieces that are under way in one direction.
const UNDER_WAY: usize = 4096;
/// For the other end of a connection that is just accepted.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// Where a bit flips, in the next frame of the direction that carries a message of some size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bit {
    /// In the middle of what the frame carries: only checksums can find it.
    Content,
    /// In the frame's length: the ends lose each other.
    Framing,
}

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From who connected to who was connected to.
    There,
    /// Back.
    Back,
}

/// A proxy in front of one server. Dropping it ends every connection.
#[derive(Debug)]
pub struct Wire {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    delay: Duration,
    ended: AtomicBool,
    connections: Mutex<Vec<TcpStream>>,
    armed: Mutex<Option<(Way, Bit)>>,
    flipped: AtomicUsize,
}

impl Wire {
    /// Listens on a free port of `host`, and passes on to `target` what comes, and back, each way `delay` late.
    ///
    /// # Panics
    /// It cannot listen there.
    pub fn new(host: IpAddr, target: SocketAddr, delay: Duration) -> Self {
        sleep_exactly();
        let listener = TcpListener::bind((host, 0)).expect("a free port of this host");
        let address = listener.local_addr().expect("a listener has an address");
        let shared = Arc::new(Shared {
            delay,
            ended: AtomicBool::new(false),
            connections: Mutex::default(),
            armed: Mutex::default(),
            flipped: AtomicUsize::new(0),
        });
        let of_listener = Arc::clone(&shared);
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                if of_listener.ended.load(Ordering::Acquire) {
                    return;
                }
                let shared = Arc::clone(&of_listener);
                thread::spawn(move || {
                    // A server that cannot be reached is seen by who connected: its connection ends.
                    if let Ok(far) = TcpStream::connect_timeout(&target, CONNECT_DEADLINE) {
                        drop(shared.join(near, far));
                    }
                });
            }
        });
        Self { address, shared }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Flips a bit of the next frame that goes this way.
    pub fn flip(&self, way: Way, bit: Bit) {
        *lock(&self.shared.armed) = Some((way, bit));
    }

    /// Bits that were flipped.
    pub fn flipped(&self) -> usize {
        self.shared.flipped.load(Ordering::Acquire)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        drop(TcpStream::connect_timeout(&self.address, CONNECT_DEADLINE)); // Wakes the listener.
        for connection in lock(&self.shared.connections).drain(..) {
            drop(connection.shutdown(Shutdown::Both)); // It may have ended.
        }
    }
}

impl Shared {
    fn join(self: &Arc<Self>, near: TcpStream, far: TcpStream) -> io::Result<()> {
        for socket in [&near, &far] {
            socket.set_nodelay(true)?;
        }
        {
            let mut connections = lock(&self.connections);
            connections.extend([near.try_clone()?, far.try_clone()?]);
            if self.ended.load(Ordering::Acquire) {
                return near.shutdown(Shutdown::Both);
            }
        }
        let (there, back) = ((near.try_clone()?, far.try_clone()?), (far, near));
        for (way, (from, to)) in [(Way::There, there), (Way::Back, back)] {
            let shared = Arc::clone(self);
            thread::spawn(move || shared.carry(way, from, to));
        }
        Ok(())
    }

    /// Carries one direction until either end closes, then closes the other.
    fn carry(&self, way: Way, from: TcpStream, to: TcpStream) {
        let ends = (from.try_clone(), to.try_clone());
        drop(if self.delay.is_zero() { self.at_once(way, from, to) } else { self.later(from, to) });
        for end in [ends.0, ends.1].into_iter().flatten() {
            drop(end.shutdown(Shutdown::Both));
        }
    }

    fn at_once(&self, way: Way, mut from: TcpStream, mut to: TcpStream) -> io::Result<()> {
        let mut frames = Frames::new(way);
        let mut piece = vec![0; PIECE];
        loop {
            let count = from.read(&mut piece)?;
            if count == 0 {
                return Ok(());
            }
            let armed = || {
                let mut armed = lock(&self.armed);
                let (wanted, bit) = (*armed)?;
                (wanted == way).then(|| {
                    *armed = None;
                    self.flipped.fetch_add(1, Ordering::AcqRel);
                    bit
                })
            };
            frames.pass(&mut piece[..count], armed);
            to.write_all(&piece[..count])?;
        }
    }

    fn later(&self, mut from: TcpStream, mut to: TcpStream) -> io::Result<()> {
        let (pieces, due) = sync_channel::<(Instant, Vec<u8>)>(UNDER_WAY);
        let writer = thread::spawn(move || write_when_due(&due, &mut to));
        let mut piece = vec![0; PIECE];
        loop {
            let count = from.read(&mut piece)?;
            let late = (Instant::now() + self.delay, piece[..count].to_vec());
            if count == 0 || pieces.send(late).is_err() {
                drop(pieces);
                return writer.join().unwrap_or(Ok(()));
            }
        }
    }
}

fn write_when_due(pieces: &Receiver<(Instant, Vec<u8>)>, to: &mut TcpStream) -> io::Result<()> {
    while let Ok((due, bytes)) = pieces.recv() {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        to.write_all(&bytes)?;
    }
    Ok(())
}

/// Threads of this process wake up to 50 us late by default, which is as long as the shortest delays. What is set for a
/// thread holds for those that it starts.
fn sleep_exactly() {
    let thread = fs::read_link("/proc/thread-self").unwrap_or_default();
    if let Some(id) = thread.file_name() {
        let file = std::path::Path::new("/proc").join(id).join("timerslack_ns");
        drop(fs::write(file, "1")); // Delays are then only less exact; who measures states what came out.
    }
}

/// Where one direction of an HTTP/2 connection is.
#[derive(Debug)]
struct Frames {
    /// Bytes until the next header begins.
    left: usize,
    header: Vec<u8>,
}

/// Length, kind, flags, stream.
const HEADER: usize = 9;
/// What a client says first.
const PREFACE: usize = 24;
const DATA: u8 = 0;
/// Smaller frames carry no work, no result and no assignment.
const LEAST: usize = 64;

impl Frames {
    fn new(way: Way) -> Self {
        let left = if way == Way::There { PREFACE } else { 0 };
        Self { left, header: Vec::with_capacity(HEADER) }
    }

    /// Follows the bytes. `armed` is asked at each frame that carries something, as far as all of its header is in this piece.
    fn pass(&mut self, piece: &mut [u8], mut armed: impl FnMut() -> Option<Bit>) {
        let mut at = 0;
        while at < piece.len() {
            if self.left > 0 {
                let passed = self.left.min(piece.len() - at);
                self.left -= passed;
                at += passed;
                continue;
            }
            self.header.push(piece[at]);
            at += 1;
            if self.header.len() < HEADER {
                continue;
            }
            let length = usize::from(self.header[0]) << 16
                | usize::from(self.header[1]) << 8
                | usize::from(self.header[2]);
            let middle = at + length / 2;
            if self.header[3] == DATA && length >= LEAST && at >= HEADER && middle < piece.len() {
                match armed() {
                    Some(Bit::Content) => piece[middle] ^= 0x10,
                    Some(Bit::Framing) => piece[at - HEADER + 2] ^= 0x10,
                    None => {}
                }
            }
            self.left = length;
            self.header.clear();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, length: u8) -> Vec<u8> {
        let mut bytes = vec![0, 0, length, kind, 0, 0, 0, 0, 1];
        bytes.extend(vec![7; usize::from(length)]);
        bytes
    }

    /// Passes frames in pieces and says which byte is another one afterwards.
    fn check(way: Way, bit: Bit, cut: usize, expected: Option<usize>) {
        let mut whole = if way == Way::There { vec![9; PREFACE] } else { Vec::new() };
        for (kind, length) in [(4, 100), (DATA, 10), (DATA, 100), (DATA, 90)] {
            whole.extend(frame(kind, length));
        }
        let (mut passed, mut armed) = (whole.clone(), Some(bit));
        let mut frames = Frames::new(way);
        let (first, second) = passed.split_at_mut(cut);
        frames.pass(first, || armed.take());
        frames.pass(second, || armed.take());
        let changed: Vec<usize> =
            (0..whole.len()).filter(|&index| whole[index] != passed[index]).collect();
        assert_eq!(changed, expected.into_iter().collect::<Vec<_>>(), "{way:?} {bit:?} {cut}");
    }

    #[test]
    fn a_bit_flips_in_the_first_frame_that_carries_something() {
        let third = 109 + 19;
        check(Way::Back, Bit::Content, 0, Some(third + HEADER + 50));
        check(Way::Back, Bit::Framing, 0, Some(third + 2));
        check(Way::There, Bit::Content, 5, Some(PREFACE + third + HEADER + 50));
        // A frame whose header or middle is not in one piece is left for the next.
        check(Way::Back, Bit::Content, third + 4, Some(third + 109 + HEADER + 45));
        check(Way::Back, Bit::Content, third + 20, Some(third + 109 + HEADER + 45));
    }
}

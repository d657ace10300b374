//! A refusal that the peer can read, on a connection that will carry no call.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Bytes that are read and thrown away while the peer takes the refusal in.
const SWALLOWED_BYTES: usize = 64 << 10;

/// What every HTTP/2 client says first, and the head of each frame after it: 3 bytes of length, its kind, and 5 more.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEAD: usize = 9;
/// A frame that begins a call.
const HEADERS: u8 = 0x1;
/// Bytes in which a client's first call begins.
const FIRST_BYTES: usize = 4096;

/// Why a connection gets no service. The numbers are error codes of HTTP/2, which gRPC turns into statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Too many connections: RESOURCE_EXHAUSTED.
    Overloaded = 0xb,
    /// Plaintext where TLS is wanted: PERMISSION_DENIED.
    Insecure = 0xc,
}

/// Tells an HTTP/2 peer why it is refused and closes the connection, all within `limit`. A peer that does not listen, or
/// speaks something else, is left alone.
pub async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    refusal: Refusal,
    message: &str,
    limit: Duration,
) {
    let told = async {
        // A client that hears the reason before it has made its call tells its user that the connection was closed.
        drop(tokio::time::timeout(limit / 4, first_call(&mut stream)).await);
        stream.write_all(&frames(refusal, message)).await?;
        stream.shutdown().await?;
        // A socket that is closed with unread bytes in it resets the connection, and the peer may never see the answer.
        let (mut buffer, mut swallowed) = ([0; 4096], 0);
        while swallowed < SWALLOWED_BYTES {
            match stream.read(&mut buffer).await? {
                0 => break,
                n => swallowed += n,
            }
        }
        Ok::<_, std::io::Error>(())
    };
    match tokio::time::timeout(limit, told).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::trace!(%error, "a refused peer did not wait for the reason"),
        Err(_) => tracing::trace!("a refused peer did not hang up"),
    }
}

/// Reads until a call has begun, or until it is plain that none will.
async fn first_call<S: AsyncRead + Unpin>(stream: &mut S) -> std::io::Result<()> {
    let (mut bytes, mut filled) = ([0; FIRST_BYTES], 0);
    while may_call(&bytes[..filled]) {
        match stream.read(&mut bytes[filled..]).await? {
            0 => break,
            n => filled += n,
        }
    }
    Ok(())
}

/// Whether these are first bytes of a client that has not called yet.
fn may_call(bytes: &[u8]) -> bool {
    let Some(mut frames) = bytes.strip_prefix(PREFACE) else { return PREFACE.starts_with(bytes) };
    while let [a, b, c, kind, ..] = *frames {
        if kind == HEADERS {
            return false;
        }
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        let Some(rest) = frames.get(FRAME_HEAD + length..) else { break };
        frames = rest;
    }
    bytes.len() < FIRST_BYTES
}

/// An empty SETTINGS, which must come first, and a GOAWAY with the reason.
fn frames(refusal: Refusal, message: &str) -> Vec<u8> {
    const SETTINGS: u8 = 0x4;
    const GOAWAY: u8 = 0x7;
    let mut bytes = Vec::with_capacity(9 + 9 + 8 + message.len());
    let head = |bytes: &mut Vec<u8>, length: usize, kind: u8| {
        let length = u32::try_from(length).expect("a reason is short");
        bytes.extend_from_slice(&length.to_be_bytes()[1..]);
        // No flags, stream 0.
        bytes.extend_from_slice(&[kind, 0, 0, 0, 0, 0]);
    };
    head(&mut bytes, 0, SETTINGS);
    head(&mut bytes, 8 + message.len(), GOAWAY);
    // No stream was looked at, so that every call may be made again elsewhere.
    bytes.extend_from_slice(&0u32.to_be_bytes());
    bytes.extend_from_slice(&(refusal as u32).to_be_bytes());
    bytes.extend_from_slice(message.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, length: u8) -> Vec<u8> {
        let mut bytes = vec![0, 0, length, kind, 0, 0, 0, 0, 0];
        bytes.resize(FRAME_HEAD + usize::from(length), 7);
        bytes
    }

    #[test]
    fn a_call_is_told_from_what_comes_before_it() {
        let begun = [PREFACE, &frame(0x4, 12), &frame(0x8, 4)].concat();
        for end in 0..=begun.len() {
            assert!(may_call(&begun[..end]), "{end} bytes");
        }
        assert!(!may_call(&[&begun[..], &frame(HEADERS, 30)].concat()));
        assert!(!may_call(b"GET / HTTP/1.1\r\n"));
        assert!(!may_call(&[0x16, 3, 1]));
        assert!(!may_call(&[PREFACE, &vec![0; FIRST_BYTES]].concat()[..FIRST_BYTES]));
    }
}

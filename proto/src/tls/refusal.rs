//! A refusal that the peer can read, on a connection that will carry no call.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Bytes that are read and thrown away while the peer takes the refusal in.
const SWALLOWED_BYTES: usize = 64 << 10;

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

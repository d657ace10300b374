//! `shimmer healthcheck`: one plain HTTP request, for containers whose image has no other program.

use std::{
    io::{self, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs as _},
    str::FromStr,
    time::{Duration, Instant},
};

use crate::{config::Period, error::Error, output};

/// Longest answer that is read; a reason is one line.
const ANSWER_MAX: u64 = 16 * 1024;

const EXAMPLES: &str = "\
Examples:
  shimmer healthcheck                                     can this process do its work?
  shimmer healthcheck --url http://127.0.0.1:9464/livez   does it run?";

/// Flags of the command.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct HealthcheckArgs {
    /// What is asked: the port of --metrics-listen with /readyz or /livez. Plain HTTP, as that port speaks no TLS
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9464/readyz")]
    url: PageUrl,
    /// Time for the whole answer
    #[arg(long, value_name = "TIME", default_value = "2s")]
    timeout: Period,
}

/// `http://host:port/path`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PageUrl {
    authority: String,
    path: String,
}

/// Why a text is not a [`PageUrl`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the address of a page; write http://HOST:PORT/readyz, IPv6 literals in brackets"
)]
struct ParsePageUrlError(String);

impl FromStr for PageUrl {
    type Err = ParsePageUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = || ParsePageUrlError(text.to_owned());
        let rest = text.strip_prefix("http://").ok_or_else(refused)?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = authority.rsplit_once(':').ok_or_else(refused)?;
        let literal = host.starts_with('[') && host.ends_with(']');
        let printable = text.chars().all(|c| c.is_ascii_graphic());
        let whole = !host.is_empty() && (literal || !host.contains(':')) && !host.contains('@');
        if !printable || !whole || port.parse::<u16>().is_err() {
            return Err(refused());
        }
        let path = if path.is_empty() { "/" } else { path };
        Ok(Self { authority: authority.to_owned(), path: path.to_owned() })
    }
}

/// Runs the command: prints the answer's line.
///
/// # Errors
/// Nobody answers in time, or the answer is not 200: its line is the reason.
pub fn run(args: &HealthcheckArgs) -> Result<(), Error> {
    let PageUrl { authority, path } = &args.url;
    let asked = format!("not healthy by http://{authority}{path}");
    let answer = ask(&args.url, args.timeout.0).map_err(|error| Error::failed(&asked, error))?;
    let (status, line) = parse(&answer)
        .ok_or_else(|| Error::failed(&asked, "the answer is not one of an HTTP server"))?;
    if status == 200 {
        return output::line(line);
    }
    Err(Error::failed(asked, format!("status {status}: {line}")))
}

/// Status and first line of an answer.
fn parse(answer: &[u8]) -> Option<(u16, &str)> {
    let (head, body) = std::str::from_utf8(answer).ok()?.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.get(2..5)?.parse().ok()?;
    Some((status, body.lines().next().unwrap_or_default()))
}

fn ask(url: &PageUrl, timeout: Duration) -> io::Result<Vec<u8>> {
    let until = Instant::now() + timeout;
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {timeout:?}"));
    let left = || until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in url.authority.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left().ok_or_else(late)?) {
            Ok(socket) => return exchange(socket, url, || left().ok_or_else(late)),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Sends the request and reads to the end, with what is left of the time before each step.
fn exchange(
    mut socket: TcpStream,
    url: &PageUrl,
    left: impl Fn() -> io::Result<Duration>,
) -> io::Result<Vec<u8>> {
    let PageUrl { authority, path } = url;
    socket.set_write_timeout(Some(left()?))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes())?;
    let (mut answer, mut part) = (Vec::new(), [0; 4096]);
    while (answer.len() as u64) < ANSWER_MAX {
        socket.set_read_timeout(Some(left()?))?;
        match socket.read(&mut part) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&part[..count]),
            // A read that times out says that it would block.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => drop(left()?),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(answer)
}

#[cfg(test)]
mod tests;

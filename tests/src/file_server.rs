//! A file server that keeps to HTTP/1.1 as far as a test lets it: ranges, ETags, redirects, and every way to fail.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// How often a connection that says nothing looks whether the server has ended.
const POLL: Duration = Duration::from_millis(5);

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Path below the server's root, without a leading slash.
    pub path: String,
    /// What stood in the first line.
    pub target: String,
    /// By lower-case name.
    pub headers: BTreeMap<String, String>,
    /// How many requests for this path there were before.
    pub before: usize,
}

impl Request {
    /// First byte and end of what is asked for.
    pub fn range(&self) -> Option<Range<u64>> {
        let text = self.headers.get("range")?.strip_prefix("bytes=")?;
        let (first, last) = text.split_once('-')?;
        Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
    }
}

/// What the server does with a request.
#[derive(Debug, Clone)]
pub enum Reply {
    /// The file, or the stretch of it that was asked for.
    File,
    /// The same of other contents, as another version.
    Version(&'static str, Vec<u8>),
    /// The whole file, whatever was asked for.
    Whole,
    /// So many bytes of the right answer's body, and the connection is closed.
    Cut(usize),
    /// So many bytes of the right answer's body, and then nothing.
    Stall(usize),
    /// A status with headers and a body.
    Status(u16, Vec<(&'static str, String)>, String),
    /// The right answer with another header.
    With(&'static str, String),
}

type Rule = dyn Fn(&Request) -> Reply + Send + Sync;

/// The server. Dropping it ends it.
#[derive(Debug)]
pub struct FileServer {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    ended: Arc<AtomicBool>,
}

impl FileServer {
    /// Serves the files of a directory by a rule.
    ///
    /// # Panics
    /// There is no port.
    pub fn start(root: &Path, rule: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a port");
        let address = listener.local_addr().expect("a listener has an address");
        let (requests, ended) = (Arc::<Mutex<Vec<Request>>>::default(), Arc::default());
        let server = Self { address, requests: Arc::clone(&requests), ended: Arc::clone(&ended) };
        let (root, rule): (PathBuf, Arc<Rule>) = (root.to_owned(), Arc::new(rule));
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                let (root, rule) = (root.clone(), Arc::clone(&rule));
                let (requests, ended) = (Arc::clone(&requests), Arc::clone(&ended));
                // A client that goes away in the middle is what many tests are about.
                thread::spawn(move || drop(converse(&socket, &root, &*rule, &requests, &ended)));
            }
        });
        server
    }

    /// `http://ADDRESS`, with a path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
    }
}

/// Answers the requests of one connection until one of them ends it.
fn converse(
    socket: &TcpStream,
    root: &Path,
    rule: &Rule,
    requests: &Mutex<Vec<Request>>,
    ended: &AtomicBool,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(socket);
    loop {
        let mut request = match read(&mut reader) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(()),
            // What is no text, as a TLS handshake, is answered as servers do.
            Err(error) => {
                let mut socket = socket;
                socket.write_all(b"HTTP/1.1 400 x\r\nconnection: close\r\n\r\n")?;
                return Err(error);
            }
        };
        {
            let mut seen = requests.lock().unwrap_or_else(PoisonError::into_inner);
            request.before = seen.iter().filter(|it| it.path == request.path).count();
            seen.push(request.clone());
        }
        if !answer(socket, root, &request, rule(&request), ended)? {
            return Ok(());
        }
    }
}

fn read(reader: &mut impl BufRead) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
    // To a proxy the whole URL is said.
    let path = target.split_once("://").and_then(|(_, rest)| rest.split_once('/'));
    let path = path.map_or(target.trim_start_matches('/'), |(_, path)| path).to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    Ok(Some(Request { path, target, headers, before: 0 }))
}

/// Whether the connection goes on.
fn answer(
    mut socket: &TcpStream,
    root: &Path,
    request: &Request,
    reply: Reply,
    ended: &AtomicBool,
) -> std::io::Result<bool> {
    if let Reply::Status(status, headers, body) = reply {
        let headers: String =
            headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        write!(socket, "HTTP/1.1 {status} x\r\n{headers}content-length: {length}\r\n\r\n{body}")?;
        return Ok(true);
    }
    let (etag, bytes) = match &reply {
        Reply::Version(etag, bytes) => (*etag, bytes.clone()),
        _ => match fs::read(root.join(&request.path)) {
            Ok(bytes) => ("\"one\"", bytes),
            Err(_) => {
                write!(socket, "HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n")?;
                return Ok(true);
            }
        },
    };
    let total = bytes.len() as u64;
    let range = request.range().filter(|_| !matches!(reply, Reply::Whole));
    let mut head = match &range {
        Some(range) if range.start >= total => {
            write!(
                socket,
                "HTTP/1.1 416 x\r\ncontent-range: bytes */{total}\r\ncontent-length: 0\r\n\r\n"
            )?;
            return Ok(true);
        }
        Some(range) => {
            let last = range.end.min(total) - 1;
            format!("HTTP/1.1 206 x\r\ncontent-range: bytes {}-{last}/{total}\r\n", range.start)
        }
        None => "HTTP/1.1 200 x\r\n".to_owned(),
    };
    let range = range.map_or(0..total, |range| range.start..range.end.min(total));
    let index = |at: u64| usize::try_from(at).expect("a small file");
    let body = &bytes[index(range.start)..index(range.end)];
    head.push_str(&format!("etag: {etag}\r\n"));
    match &reply {
        Reply::With(name, value) if *name == "content-length" => {
            head.push_str(&format!("{name}: {value}\r\n\r\n"));
        }
        Reply::With(name, value) => {
            head.push_str(&format!("{name}: {value}\r\ncontent-length: {}\r\n\r\n", body.len()));
        }
        _ => head.push_str(&format!("content-length: {}\r\n\r\n", body.len())),
    }
    socket.write_all(head.as_bytes())?;
    match reply {
        Reply::Cut(most) => {
            socket.write_all(&body[..most.min(body.len())])?;
            Ok(false)
        }
        Reply::Stall(most) => {
            socket.write_all(&body[..most.min(body.len())])?;
            socket.set_nonblocking(true)?;
            let mut gone = false;
            while !gone && !ended.load(Ordering::SeqCst) {
                thread::sleep(POLL);
                gone = matches!(socket.peek(&mut [0]), Ok(0));
            }
            Ok(false)
        }
        _ => {
            socket.write_all(body)?;
            Ok(true)
        }
    }
}

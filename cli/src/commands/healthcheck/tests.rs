use std::{net::TcpListener, thread};

use super::*;

fn args(url: &str, timeout: Duration) -> HealthcheckArgs {
    HealthcheckArgs { url: url.parse().unwrap(), timeout: Period(timeout) }
}

/// Asks a server that answers with these bytes and closes.
fn check(answer: &'static str, expected: Result<(), &str>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/readyz", listener.local_addr().unwrap());
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut request = [0; 1024];
        let length = socket.read(&mut request).unwrap();
        assert!(request[..length].starts_with(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1:"));
        socket.write_all(answer.as_bytes()).unwrap();
    });
    let result = run(&args(&url, Duration::from_secs(30)));
    server.join().unwrap();
    match expected {
        Ok(()) => assert!(result.is_ok(), "{result:?}"),
        Err(text) => {
            let shown = result.unwrap_err().render().unwrap();
            assert!(shown.contains(text) && shown.lines().count() == 1, "{shown}");
        }
    }
}

#[test]
fn only_200_is_healthy_and_the_reason_is_one_line() {
    check("HTTP/1.1 200 OK\r\n\r\nready\n", Ok(()));
    check("HTTP/1.1 503 Service Unavailable\r\n\r\nloading\nmore\n", Err("status 503: loading"));
    check("HTTP/1.1 404 Not Found\r\n\r\n", Err("status 404"));
    check("", Err("not one of an HTTP server"));
    check("SSH-2.0-OpenSSH\r\n\r\n", Err("not one of an HTTP server"));
}

#[test]
fn a_server_that_says_nothing_is_left_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/readyz", listener.local_addr().unwrap());
    let shown = run(&args(&url, Duration::from_millis(50))).unwrap_err().render().unwrap();
    assert!(shown.contains("no answer within 50ms"), "{shown}");
    drop(listener);
    let shown = run(&args(&url, Duration::from_secs(30))).unwrap_err().render().unwrap();
    assert!(shown.contains("not healthy by http://127.0.0.1:"), "{shown}");
}

#[test]
fn addresses_are_whole() {
    let parse = |text: &str| text.parse::<PageUrl>().map(|url| (url.authority, url.path));
    let whole = |authority: &str, path: &str| Ok((authority.to_owned(), path.to_owned()));
    assert_eq!(parse("http://127.0.0.1:9464/readyz"), whole("127.0.0.1:9464", "/readyz"));
    assert_eq!(parse("http://[::1]:9464"), whole("[::1]:9464", "/"));
    for text in [
        "https://a:1/",
        "a:1/livez",
        "http://a/livez",
        "http://:1/",
        "http://a:port/",
        "http://::1:9464/",
        "http://a:1/ x",
        "http://u@a:1/",
    ] {
        assert!(parse(text).is_err(), "{text}");
    }
}

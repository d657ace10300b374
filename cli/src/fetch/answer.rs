//! What an answer to a request for a stretch of a file means.

use std::{ops::Range, time::Duration};

/// The parts of an answer's head that matter.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Head<'a> {
    pub(super) status: u16,
    pub(super) content_range: Option<&'a str>,
    pub(super) content_length: Option<u64>,
    pub(super) content_encoding: Option<&'a str>,
    pub(super) etag: Option<&'a str>,
    pub(super) last_modified: Option<&'a str>,
    pub(super) retry_after: Option<&'a str>,
    pub(super) location: Option<&'a str>,
    /// Of S3: where the bucket really is.
    pub(super) bucket_region: Option<&'a str>,
}

/// What follows, or why nothing does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// The asked stretch, or its beginning.
    Part,
    /// The whole file: this server gives no ranges.
    Whole,
    /// It may be better later.
    Later(Option<Duration>),
    /// The file has another length.
    Length(String),
    /// No.
    Refused(Option<String>),
    /// Not what HTTP allows, or not what we can use.
    Odd(String),
}

/// Reads a head. `bytes` is the length that the file has to have, if it is known, `asked` the stretch that was asked for.
pub(super) fn read(head: &Head<'_>, asked: Option<&Range<u64>>, bytes: Option<u64>) -> Answer {
    match (head.status, asked) {
        (200 | 206, _) if head.content_encoding.is_some_and(|encoding| encoding != "identity") => {
            let encoding = head.content_encoding.unwrap_or_default();
            Answer::Odd(format!(
                "the server encodes the file as {encoding:?} without being asked to"
            ))
        }
        (206, Some(asked)) => part(head, asked, bytes),
        (200, _) => match (head.content_length, bytes) {
            (Some(found), Some(bytes)) if found != bytes => Answer::Length(found.to_string()),
            _ => Answer::Whole,
        },
        (416, _) => {
            let total = head.content_range.and_then(|range| range.strip_prefix("bytes */"));
            Answer::Length(total.map_or_else(|| "fewer".to_owned(), str::to_owned))
        }
        (408 | 425 | 429 | 500 | 502 | 503 | 504, _) => Answer::Later(
            head.retry_after.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs),
        ),
        _ => Answer::Refused(hint(head)),
    }
}

fn part(head: &Head<'_>, asked: &Range<u64>, bytes: Option<u64>) -> Answer {
    let odd = |range: Option<&str>| {
        Answer::Odd(format!(
            "asked for bytes {}-{}, the server answers with {}",
            asked.start,
            asked.end - 1,
            range.unwrap_or("no Content-Range")
        ))
    };
    let Some(range) = head.content_range else { return odd(None) };
    let parsed = range.trim().strip_prefix("bytes ").and_then(|text| {
        let (span, total) = text.split_once('/')?;
        let (first, last) = span.split_once('-')?;
        Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?, total))
    });
    let Some((first, last, total)) = parsed else { return odd(Some(range)) };
    if let Some(bytes) = bytes
        && total != "*"
        && total.parse() != Ok(bytes)
    {
        return Answer::Length(total.to_owned());
    }
    if first != asked.start || last < first || last >= asked.end {
        return odd(Some(range));
    }
    match head.content_length {
        Some(length) if length != last - first + 1 => {
            Answer::Odd(format!("the server announces {length} bytes for {range}"))
        }
        _ => Answer::Part,
    }
}

/// Which version of the file it is: compared between the answers that make up one file.
pub(super) fn mark(head: &Head<'_>) -> String {
    head.etag.or(head.last_modified).unwrap_or_default().to_owned()
}

fn hint(head: &Head<'_>) -> Option<String> {
    if let Some(region) = head.bucket_region.filter(|_| matches!(head.status, 301 | 307 | 400)) {
        return Some(format!("the bucket is in {region}: set AWS_REGION={region}"));
    }
    Some(match head.status {
        301..=308 => format!(
            "redirects to {} are not followed for s3 sources: set AWS_ENDPOINT_URL or AWS_REGION to where the bucket is",
            head.location.unwrap_or("elsewhere")
        ),
        401 | 407 => "give a token with --token-file, or credentials of the proxy in its URL".to_owned(),
        403 => "check what the credentials may read, and the clock of this host, which is part of s3 signatures; a bucket without the right to list answers 403 for a name that is not there".to_owned(),
        404 | 410 => "check the source: it is the directory that holds manifest.json".to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Range<u64> = 100..200;

    fn ranged(range: &str, expected: &Answer) {
        let head = Head { status: 206, content_range: Some(range), ..Head::default() };
        assert_eq!(&read(&head, Some(&ASKED), Some(1000)), expected, "{range}");
    }

    #[test]
    fn a_part_is_taken_only_where_it_was_asked_for() {
        ranged("bytes 100-199/1000", &Answer::Part);
        ranged("bytes 100-149/1000", &Answer::Part);
        ranged("bytes 100-199/*", &Answer::Part);
        ranged("bytes 100-199/1001", &Answer::Length("1001".to_owned()));
        ranged("bytes 100-199/x", &Answer::Length("x".to_owned()));
        for range in
            ["bytes 0-99/1000", "bytes 100-200/1000", "bytes 100-99/1000", "100", "items 1-2/3"]
        {
            let head = Head { status: 206, content_range: Some(range), ..Head::default() };
            let found = read(&head, Some(&ASKED), Some(1000));
            assert!(matches!(found, Answer::Odd(_)), "{range}: {found:?}");
        }
        let none = Head { status: 206, ..Head::default() };
        assert!(matches!(read(&none, Some(&ASKED), Some(1000)), Answer::Odd(_)));
    }

    fn status(status: u16, head: Head<'_>, expected: &Answer) {
        let found = read(&Head { status, ..head }, Some(&ASKED), Some(1000));
        assert_eq!(&found, expected, "{status}");
    }

    #[test]
    fn a_status_says_whether_to_come_back() {
        let none = Head::default();
        status(200, none, &Answer::Whole);
        status(200, Head { content_length: Some(1000), ..none }, &Answer::Whole);
        status(
            200,
            Head { content_length: Some(1 << 60), ..none },
            &Answer::Length((1u64 << 60).to_string()),
        );
        status(
            416,
            Head { content_range: Some("bytes */50"), ..none },
            &Answer::Length("50".to_owned()),
        );
        status(503, none, &Answer::Later(None));
        let after = |text| Head { retry_after: Some(text), ..none };
        status(429, after("7"), &Answer::Later(Some(Duration::from_secs(7))));
        status(503, after("Fri, 31 Dec 1999 23:59:59 GMT"), &Answer::Later(None));
        let zipped = Head { status: 200, content_encoding: Some("gzip"), ..none };
        assert!(matches!(read(&zipped, None, None), Answer::Odd(_)));
        for (code, part) in [(403, "credentials"), (404, "manifest.json"), (401, "--token-file")] {
            let Answer::Refused(Some(hint)) = read(&Head { status: code, ..none }, None, None)
            else {
                panic!("{code} is refused")
            };
            assert!(hint.contains(part), "{hint}");
        }
        let moved = Head { status: 301, bucket_region: Some("eu-north-1"), ..none };
        let Answer::Refused(Some(hint)) = read(&moved, None, None) else { panic!("refused") };
        assert!(hint.contains("AWS_REGION=eu-north-1"), "{hint}");
    }
}

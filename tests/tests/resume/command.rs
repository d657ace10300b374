//! `shimmer generate` with several endpoints.

use std::{
    io::Read as _,
    process::{Child, Command, Stdio},
};

use shimmer_proto::v1::{GenerateResponse, generate_response::Event};
use shimmer_tests::process::shimmer_binary;

use super::bench::{Bench, request};

/// `shimmer generate` for the tests' request.
fn generate(ports: &[u16], id: &str, max_tokens: u32, more: &[&str]) -> Child {
    let endpoints: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let ids: Vec<String> = (1..40).map(|id: u32| id.to_string()).collect();
    let (endpoints, ids, max_tokens) = (endpoints.join(","), ids.join(","), max_tokens.to_string());
    let fixed = ["generate", "--endpoint", &endpoints, "--token-ids", &ids, "--request-id", id];
    let sampling = ["--temperature", "1.1", "--top-k", "60", "--repetition-penalty", "1.05"];
    let rest =
        ["--frequency-penalty", "0.1", "--seed", "77", "--stop", "no such text", "--ignore-eos"];
    let mut command = Command::new(shimmer_binary());
    command.args(fixed).args(sampling).args(rest).args(["--max-tokens", &max_tokens]).args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn text(events: &[GenerateResponse]) -> String {
    let of = |event: &GenerateResponse| match &event.event {
        Some(Event::Delta(delta)) => delta.text.clone(),
        _ => String::new(),
    };
    events.iter().map(of).collect()
}

/// Waits for the first text of a child.
fn first_text(child: &mut Child) -> Vec<u8> {
    let mut first = vec![0; 16];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    first
}

/// What a child writes until its end, and whether it ended well.
fn finish(child: Child, mut out: Vec<u8>) -> (String, String, bool) {
    let output = child.wait_with_output().unwrap();
    out.extend(output.stdout);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&out), text(&output.stderr), output.status.success())
}

#[test]
fn an_answer_is_joined_over_coordinators_that_die() {
    let mut bench = Bench::new();
    let expected = text(&bench.whole(bench.cluster.port, request("undisturbed", 800)));
    let mut first = bench.another(&[]);
    let mut child = generate(&[first.port, bench.cluster.port], "joined", 800, &[]);
    let out = first_text(&mut child);
    first.process.kill();
    let (out, error, good) = finish(child, out);
    assert!(good, "{error}");
    assert_eq!(out, format!("{expected}\n"), "{error}");
    assert!(
        error.contains("broke off after") && error.contains("goes on with the answer"),
        "{error}"
    );
}

#[test]
fn a_coordinator_that_is_not_there_is_passed_over() {
    let mut bench = Bench::new();
    let mut gone = bench.another(&[]);
    gone.process.kill();
    let expected = text(&bench.whole(bench.cluster.port, request("undisturbed", 10)));
    let child = generate(&[gone.port, bench.cluster.port], "passed", 10, &[]);
    let (out, error, good) = finish(child, Vec::new());
    assert!(good, "{error}");
    assert_eq!(out, format!("{expected}\n"));
    assert!(error.contains(&gone.port.to_string()), "{error}");
}

#[test]
fn an_answer_that_nobody_knows_is_said_to_be_incomplete() {
    let mut bench = Bench::new();
    let elsewhere = bench.cluster.directory().join("elsewhere").display().to_string();
    let mut first = bench.with_args(&["--journal", &elsewhere]);
    let mut child = generate(
        &[first.port, bench.cluster.port],
        "unknown",
        900,
        &["--resume-timeout", "2s", "--connect-timeout", "1s"],
    );
    let out = first_text(&mut child);
    first.process.kill();
    let (_, error, good) = finish(child, out);
    assert!(!good, "{error}");
    assert!(error.contains("broke off after"), "{error}");
    // One has another journal, one is dead.
    assert!(error.contains("NOT_FOUND") && error.contains("--resume-timeout"), "{error}");

    // Without a journal nobody is asked at all.
    let mut plain = bench.with_args(&[]);
    let mut child = generate(&[plain.port, bench.cluster.port], "unjournaled", 900, &[]);
    let out = first_text(&mut child);
    plain.process.kill();
    let (_, error, good) = finish(child, out);
    assert!(!good && error.contains("journal"), "{error}");
}

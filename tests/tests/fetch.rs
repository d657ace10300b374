//! `shimmer fetch` against a real server that does what servers do: it breaks off, lies, changes and redirects.

mod access;
mod bench;
mod faults;
mod refusals;
mod restarts;

use shimmer_tests::{
    file_server::Reply,
    process::{generate_args, shimmer_binary, without_variables},
};

use bench::Bench;

/// The SHA-256 sum over the logits, and the tokens, of a generation with a container.
fn generation(container: &std::path::Path) -> serde_json::Value {
    let mut command = std::process::Command::new(shimmer_binary());
    let output =
        without_variables(&mut command).args(generate_args(container, &[])).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(answer["logits_sha256"].is_string(), "{answer}");
    serde_json::json!([answer["logits_sha256"], answer["tokens"], answer["fingerprint"]])
}

#[test]
fn a_fetched_container_is_the_one_that_was_served() {
    let bench = Bench::new();
    let server = bench.serve(|_| Reply::File);
    let said = bench.must(&server.url("/"), &[]);
    assert!(said.contains(&bench.digest) && said.contains("fetched"), "{said}");
    bench.check_whole();
    let verified = bench.shimmer(&["verify", bench.out.to_str().unwrap()], &[]);
    assert!(verified.ok, "{}", verified.said);
    assert_eq!(generation(&bench.out), generation(&bench.source));

    // A directory that holds it needs no server.
    let asked = server.requests().len();
    let said = bench.must(&server.url("/"), &[]);
    assert!(said.contains("was there already"), "{said}");
    assert_eq!(server.requests().len(), asked);
    let json = bench.must(&server.url("/"), &["--json"]);
    let json: serde_json::Value = serde_json::from_str(json.trim()).unwrap();
    assert_eq!(
        (&json["digest"], &json["files_fetched"]),
        (&bench.digest.as_str().into(), &0.into())
    );

    // Damage is found on demand, and only that file comes again.
    let file = bench.out.join("experts/layer-001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let said = bench.must(&server.url("/"), &["--verify"]);
    assert!(said.contains("layer-001.safetensors is damaged"), "{said}");
    bench.check_whole();
    let again: Vec<_> = server.requests().split_off(asked).into_iter().map(|it| it.path).collect();
    assert!(
        !again.is_empty() && again.iter().all(|it| it == "experts/layer-001.safetensors"),
        "{again:?}"
    );
}

//! Clients that are not ours: Python stubs made by grpcio-tools, and grpcurl, against a coordinator with two workers.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    client,
    cluster::{Cluster, ClusterOptions},
    models::TinyModel,
};

/// Where `./test` has put the clients.
const ENVIRONMENT: &str = "SHIMMER_TEST_CLIENTS";

/// The directory with the clients' programs; says why when there is none.
#[expect(
    clippy::print_stderr,
    reason = "the reason of a skipped test is for the person who runs it"
)]
fn programs(test: &str) -> Option<PathBuf> {
    let programs =
        std::env::var_os(ENVIRONMENT).map(|environment| PathBuf::from(environment).join("bin"));
    if programs.is_none() {
        eprintln!("skipped {test}: {ENVIRONMENT} names no environment with third-party clients");
    }
    programs
}

fn cluster(model: &TinyModel) -> Cluster {
    Cluster::start(&ClusterOptions::new(&model.container(NumericClass::default()), 2))
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Standard output of a client that must succeed.
fn succeed(name: &str, output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{name}: {}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn python_stubs_drive_every_call() {
    let Some(programs) = programs("python_stubs_drive_every_call") else { return };
    let model = TinyModel::new(Preset::Glm4Moe);
    let cluster = cluster(&model);
    let output = Command::new(programs.join("python"))
        .arg(repository().join("tests/clients/client.py"))
        .arg(cluster.port.to_string())
        .arg(repository().join("proto/proto"))
        .output()
        .unwrap();
    let answer: Value = serde_json::from_str(&succeed("client.py", &output)).unwrap();
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(answer["logits_sha256"].as_str().unwrap().len(), 64);
}

#[test]
fn grpcurl_lists_describes_and_streams() {
    let Some(programs) = programs("grpcurl_lists_describes_and_streams") else { return };
    let model = TinyModel::new(Preset::Olmoe);
    let cluster = cluster(&model);
    let address = format!("127.0.0.1:{}", cluster.port);
    let grpcurl = |before: &[&str], after: &[&str]| {
        let mut command = Command::new(programs.join("grpcurl"));
        command.arg("-plaintext").args(before).arg(&address).args(after);
        succeed("grpcurl", &command.output().unwrap())
    };
    let services = grpcurl(&[], &["list"]);
    for service in ["shimmer.v1.InferenceService", "grpc.health.v1.Health"] {
        assert!(services.lines().any(|line| line == service), "{services}");
    }
    assert!(
        !services.contains("shimmer.expert"),
        "the expert stream is not for clients: {services}"
    );
    let described = grpcurl(&[], &["describe", "shimmer.v1.SamplingParams"]);
    assert!(described.contains("optional float temperature = 1;"), "{described}");

    let request = json!({
        "token_ids": { "ids": [1, 2, 3] },
        "sampling": { "temperature": 0 },
        "stop": { "max_tokens": 5, "ignore_eos": true },
        "output": { "logits_digest": true },
    });
    let data = request.to_string();
    let stream = grpcurl(&["-d", &data], &["shimmer.v1.InferenceService/Generate"]);
    let events: Vec<Value> =
        serde_json::Deserializer::from_str(&stream).into_iter().collect::<Result<_, _>>().unwrap();
    let finished = &events.last().unwrap()["finished"];
    assert_eq!(finished["reason"], "FINISH_REASON_LENGTH", "{stream}");
    let ours = cluster.generate(client::greedy(&[1, 2, 3], 5)).unwrap();
    assert_eq!(finished["logitsSha256"], ours.logits_sha256);
}

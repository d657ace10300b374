//! What the chart renders runs: etcd, a worker, a coordinator and the pod of `helm test` as processes on this machine, with
//! the arguments and the certificates of one rendering. Only paths, ports and the names of services are put in their place.

use std::{fs, net::TcpListener, path::Path, process::Command, time::Duration};

use serde_json::Value;
use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    chart::{Helm, Tools, describe},
    etcd,
    models::TinyModel,
    process::{Process, shimmer_binary, without_variables},
    wait::wait_for,
};

use super::Case;

/// For processes on a busy machine.
const SOON: Duration = Duration::from_secs(90);

/// A rendering, with everything that is other here than in a cluster.
struct Here {
    objects: Vec<Value>,
    replaced: Vec<(String, String)>,
}

impl Here {
    /// The arguments of the main container of an object.
    fn args(&self, object: &str) -> Vec<String> {
        let found = self.objects.iter().find(|found| describe(found) == object).unwrap();
        let spec = match object.starts_with("Pod ") {
            true => &found["spec"],
            false => &found["spec"]["template"]["spec"],
        };
        let args = spec["containers"][0]["args"].as_array().unwrap();
        args.iter().map(|arg| self.put(arg.as_str().unwrap())).collect()
    }

    fn put(&self, arg: &str) -> String {
        self.replaced.iter().fold(arg.to_owned(), |arg, (from, to)| arg.replace(from, to))
    }

    /// Writes the files of a secret.
    fn write_secret(&self, name: &str, directory: &Path) {
        let secret =
            self.objects.iter().find(|object| describe(object) == format!("Secret {name}"));
        fs::create_dir_all(directory).unwrap();
        for (file, value) in secret.unwrap()["data"].as_object().unwrap() {
            fs::write(directory.join(file), base64(value.as_str().unwrap())).unwrap();
        }
    }
}

/// The bytes of a secret.
fn base64(text: &str) -> Vec<u8> {
    let digit = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let (mut bytes, mut group, mut bits) = (Vec::new(), 0_u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        (group, bits) = (group << 6 | u32::from(digit(letter)), bits + 6);
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from(group >> bits & 0xff).unwrap());
        }
    }
    bytes
}

fn free_ports<const COUNT: usize>() -> [u16; COUNT] {
    let listeners = [0; COUNT].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

#[test]
fn what_is_rendered_generates_a_token() {
    let Some(tools) = Tools::find() else { return };
    if !etcd::available() {
        return;
    }
    let model = TinyModel::new(Preset::Olmoe);
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let ports = free_ports::<7>();
    let [client, peer, health, coordinator, admin, worker, worker_page] = ports;
    let path = |name: &str| root.join(name).to_str().unwrap().to_owned();
    let pair = |from: &str, to: String| (from.to_owned(), to);
    let container = model.container(NumericClass::default());
    let common = vec![
        pair("$(POD_NAME).rel-shimmer-etcd.models.svc:2379", format!("127.0.0.1:{client}")),
        pair("$(POD_NAME).rel-shimmer-etcd.models.svc:2380", format!("127.0.0.1:{peer}")),
        pair("rel-shimmer-etcd-0.rel-shimmer-etcd.models.svc:2379", format!("127.0.0.1:{client}")),
        pair("rel-shimmer-etcd-0.rel-shimmer-etcd.models.svc:2380", format!("127.0.0.1:{peer}")),
        pair("0.0.0.0:2379", format!("127.0.0.1:{client}")),
        pair("0.0.0.0:2380", format!("127.0.0.1:{peer}")),
        pair("0.0.0.0:2381", format!("127.0.0.1:{health}")),
        pair("$(POD_NAME).rel-shimmer-workers.models.svc:50052", format!("localhost:{worker}")),
        pair("[::]:50052", format!("[::]:{worker}")),
        pair("rel-shimmer.models.svc:50051", format!("localhost:{coordinator}")),
        pair("[::]:50051", format!("[::]:{coordinator}")),
        pair("$(POD_IP):50051", format!("127.0.0.1:{coordinator}")),
        pair("[::]:50053", format!("[::]:{admin}")),
        pair("=/model", format!("={}", container.display())),
        pair("/var/lib/etcd", path("etcd")),
        pair("/var/lib/shimmer", path("state")),
        pair("$(NODE_NAME)", "host-1".to_owned()),
    ];
    let role = |name: &str, page: u16| {
        let own = [
            pair("$(POD_NAME)", name.to_owned()),
            pair("[::]:9464", format!("[::]:{page}")),
            pair("/etc/shimmer/tls", path(name)),
        ];
        common.iter().cloned().chain(own).collect()
    };
    let objects = Case::of("minimal-values.yaml").render(&tools, Helm::Four, "1.37.0");
    let here =
        |name: &str, page: u16| Here { objects: objects.clone(), replaced: role(name, page) };
    fs::create_dir_all(root.join("state")).unwrap();

    let node = here("rel-shimmer-etcd-0", 0);
    let mut command = Command::new("etcd");
    command.args(node.args("StatefulSet rel-shimmer-etcd"));
    let _etcd = Process::spawn("etcd", command, root);

    let start = |name: &'static str, object: &str, secret: &str, page: u16| {
        let here = here(name, page);
        here.write_secret(secret, &root.join(name));
        Process::shimmer(name, &here.args(object), [("LANG", "C")], root)
    };
    let mut running = [
        start("worker", "StatefulSet rel-shimmer-default", "rel-shimmer-worker-tls", worker_page),
        start(
            "coordinator",
            "Deployment rel-shimmer-coordinator",
            "rel-shimmer-coordinator-tls",
            0,
        ),
    ];
    let test = here("test", 0).args("Pod rel-shimmer-test");
    let answer = wait_for("a token by the arguments of `helm test`", SOON, || {
        for process in &mut running {
            assert!(process.ended().is_none(), "{} ended:\n{}", process.name(), process.log());
        }
        let mut command = Command::new(shimmer_binary());
        let output = without_variables(&mut command).args(&test).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    });
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(1), "{answer}");
    // The worker is a member under the name of its pod, and its certificate was made for where it is found.
    let [worker, coordinator] = &running;
    assert!(worker.log().contains("\"id\":\"worker\""), "{}", worker.log());
    assert!(!coordinator.log().contains("certificate"), "{}", coordinator.log());
}

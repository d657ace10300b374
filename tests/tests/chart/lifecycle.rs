//! A release goes through its life: install, upgrade, rollback, uninstall, by Helm against a played API server.

use std::{path::Path, sync::Arc};

use serde_json::{Value, json};
use shimmer_tests::{
    chart::{Helm, Tools, chart_directory, describe, output},
    mock_api::MockApi,
};

use super::{Case, mutations};

struct Release {
    tools: Arc<Tools>,
    helm: Helm,
    home: tempfile::TempDir,
    api: MockApi,
}

impl Release {
    fn new(helm: Helm) -> Option<Self> {
        let tools = Arc::new(Tools::find()?);
        let home = tempfile::tempdir().unwrap();
        let api = MockApi::start(Arc::clone(&tools));
        api.write_kubeconfig(&home.path().join("kubeconfig"));
        Some(Self { tools, helm, home, api })
    }

    fn run(&self, args: &[&str]) -> Result<String, String> {
        let mut command = self.tools.helm(self.helm, self.home.path());
        let output = output(command.args(args).args(["--namespace", "models"]));
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        if output.status.success() { Ok(said) } else { Err(said) }
    }

    fn install(&self, verb: &str, chart: &Path, args: &[&str]) -> Result<String, String> {
        let mut all = vec![verb, "rel", chart.to_str().unwrap(), "--disable-openapi-validation"];
        all.extend(args);
        self.run(&all)
    }

    fn must(&self, verb: &str, args: &[&str]) {
        if let Err(error) = self.install(verb, &chart_directory(), args) {
            panic!("{:?} {verb}: {error}\n{:#?}", self.helm, self.api.requests());
        }
    }

    /// What the server holds, without Helm's own records and marks.
    fn held(&self) -> Vec<Value> {
        let mut objects = self.api.objects();
        objects.retain(|object| object["type"] != "helm.sh/release.v1");
        for object in &mut objects {
            let metadata = object["metadata"].as_object_mut().unwrap();
            let annotations = metadata.get_mut("annotations").and_then(Value::as_object_mut);
            if let Some(annotations) = annotations {
                annotations.retain(|key, _| !key.starts_with("meta.helm.sh/"));
                if annotations.is_empty() {
                    metadata.remove("annotations");
                }
            }
        }
        sorted(objects)
    }

    /// What the chart renders with these values for the server's version.
    fn rendered(&self, args: &[&str]) -> Vec<Value> {
        let args = [args, &["--kube-version", "1.37.0"]].concat();
        let mut objects = self.tools.render(self.helm, &chart_directory(), &args).unwrap();
        // The pod of `helm test` is made when it is asked for.
        objects.retain(|object| object["kind"] != "Pod");
        sorted(objects)
    }

    /// Compares both, certificates aside: they are new in every rendering.
    fn holds(&self, args: &[&str]) {
        let plain = |objects: Vec<Value>| -> Vec<Value> {
            objects.into_iter().filter(|object| object["kind"] != "Secret").collect()
        };
        let (held, rendered) = (plain(self.held()), plain(self.rendered(args)));
        let names = |objects: &[Value]| objects.iter().map(describe).collect::<Vec<_>>();
        assert_eq!(names(&held), names(&rendered), "{:?}", self.helm);
        for (held, rendered) in held.iter().zip(&rendered) {
            assert_eq!(held, rendered, "{:?} {}", self.helm, describe(held));
        }
    }

    fn secrets(&self) -> Vec<Value> {
        self.held().into_iter().filter(|object| object["kind"] == "Secret").collect()
    }
}

fn sorted(mut objects: Vec<Value>) -> Vec<Value> {
    objects.sort_by_key(|object| (describe(object), object["apiVersion"].to_string()));
    objects
}

fn lives_through(helm: Helm) {
    let Some(release) = Release::new(helm) else { return };
    let values = Case::of("minimal-values.yaml").path();
    let first = ["--values", values.as_str()];
    release.must("install", &first);
    release.holds(&first);
    let certificates = release.secrets();
    assert_eq!(certificates.len(), 2);

    let change = "--set=image.tag=0.2.0,coordinator.replicas=3,worker.drainSeconds=30,api.keys.secretName=keys,networkPolicy.enabled=false,worker.sharedMemoryMiB=64";
    let second = [first[0], first[1], change];
    release.must("upgrade", &second);
    release.holds(&second);
    assert_eq!(release.secrets(), certificates, "an upgrade keeps the members' certificates");

    release.run(&["rollback", "rel", "1"]).unwrap_or_else(|error| panic!("{helm:?}: {error}"));
    release.holds(&first);
    assert_eq!(release.secrets(), certificates);

    // What cannot change is refused by the server, and Helm says so.
    let error = release
        .install(
            "upgrade",
            &chart_directory(),
            &[first[0], first[1], "--set=etcd.bundled.storage.size=4Gi"],
        )
        .unwrap_err();
    assert!(error.contains("volumeClaimTemplates"), "{helm:?}: {error}");

    release.run(&["uninstall", "rel"]).unwrap_or_else(|error| panic!("{helm:?}: {error}"));
    assert_eq!(release.api.objects(), Vec::<Value>::new(), "{helm:?} leaves something behind");
}

#[test]
fn a_release_lives_through_helm_3() {
    lives_through(Helm::Three);
}

#[test]
fn a_release_lives_through_helm_4() {
    lives_through(Helm::Four);
}

/// Every file of values installs, with everything that an API server checks.
#[test]
fn every_file_of_values_is_admitted() {
    for case in &super::CASES {
        let Some(release) = Release::new(Helm::Four) else { return };
        let args = case.args();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        release.must("install", &args);
        release.holds(&args);
    }
}

/// Mistakes that Helm lets through and an API server does not.
#[test]
fn a_mistake_in_the_chart_is_refused_at_admission() {
    for (file, from, to, finding) in [
        (
            "templates/workers.yaml",
            "matchLabels:\n      {{- include \"shimmer.selector\"",
            "matchLabels:\n      app: other\n      {{- include \"shimmer.selector\"",
            "does not match app",
        ),
        ("templates/services.yaml", "targetPort: grpc", "targetPorts: grpc", "targetPorts"),
        ("templates/coordinator.yaml", "\"%s-coordinator\"", "\"%s_coordinator\"", "no subdomain"),
    ] {
        let Some(release) = Release::new(Helm::Three) else { return };
        let copy = tempfile::tempdir().unwrap();
        let chart = copy.path().join("shimmer");
        mutations::copy_chart(&chart);
        let text = std::fs::read_to_string(chart.join(file)).unwrap();
        assert!(text.contains(from), "{file}");
        std::fs::write(chart.join(file), text.replace(from, to)).unwrap();
        let error = release.install("install", &chart, &[]).unwrap_err();
        assert!(error.contains(finding), "{file}: {error}");
    }
}

/// Certificates that the chart makes are what the members of one cluster need.
#[test]
fn generated_certificates_are_of_one_authority() {
    let Some(tools) = Tools::find() else { return };
    for helm in Helm::ALL {
        let objects = tools.render(helm, &chart_directory(), &[]).unwrap();
        let secrets: Vec<_> = objects.iter().filter(|object| object["kind"] == "Secret").collect();
        let [one, other] = secrets.as_slice() else { panic!("{} secrets", secrets.len()) };
        assert_eq!(one["type"], json!("kubernetes.io/tls"));
        assert_eq!(one["data"]["ca.crt"], other["data"]["ca.crt"]);
        assert_ne!(one["data"]["tls.key"], other["data"]["tls.key"]);
    }
}

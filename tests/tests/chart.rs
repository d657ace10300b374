//! The chart: what it renders fits Kubernetes, the program and itself, and a planted mistake is found.
//!
//! No cluster is to be had here. Helm, kubectl's types and the schemas of Kubernetes are the real ones; rules of our own
//! look at what none of them sees, and an API server is played by [`shimmer_tests::mock_api`].

mod alerting;
mod arguments;
mod lifecycle;
mod mutations;
mod platforms;
mod program;
mod readme;
mod rendering;
mod rules;
mod running;
mod values;

use serde_json::Value;
use shimmer_tests::chart::{Helm, Tools, chart_directory};

/// The schemas that every object is checked against: the oldest and the newest Kubernetes that there are.
const VERSIONS: [&str; 2] = ["1.25.0", "1.37.0"];

/// One file of values, with what must be there already where it is installed.
struct Case {
    file: &'static str,
    /// Secrets, claims and service accounts that the chart refers to and does not make, as `Kind name`.
    outside: &'static [&'static str],
    /// Whether the namespace takes only pods of level "restricted".
    restricted: bool,
}

/// Every file of values in `ci/`, and the defaults.
const CASES: [Case; 5] = [
    Case { file: "", outside: &["PersistentVolumeClaim shimmer-model"], restricted: true },
    Case {
        file: "minimal-values.yaml",
        outside: &["PersistentVolumeClaim tiny-model"],
        restricted: true,
    },
    Case {
        file: "glm5-values.yaml",
        outside: &["Secret glm-5-api-keys", "Secret glm-5-api-tls"],
        restricted: false,
    },
    Case {
        file: "cpu-only-values.yaml",
        outside: &[
            "Secret model-store",
            "Secret etcd-password",
            "Secret etcd-client",
            "Secret member-coordinator",
            "Secret member-worker",
        ],
        restricted: true,
    },
    Case {
        file: "restricted-values.yaml",
        outside: &[
            "PersistentVolumeClaim model",
            "PersistentVolumeClaim journal",
            "Secret etcd-client",
            "Secret etcd-server",
            "Secret api-keys",
            "Secret api-tls",
        ],
        restricted: true,
    },
];

impl Case {
    fn of(file: &str) -> &'static Self {
        CASES.iter().find(|case| case.file == file).expect("the file is a case")
    }

    /// Arguments that give Helm these values.
    fn args(&self) -> Vec<String> {
        if self.file.is_empty() {
            return Vec::new();
        }
        vec!["--values".to_owned(), self.path()]
    }

    fn path(&self) -> String {
        chart_directory().join("ci").join(self.file).to_str().expect("a UTF-8 path").to_owned()
    }

    /// What is rendered for a version of Kubernetes.
    fn render(&self, tools: &Tools, helm: Helm, version: &str) -> Vec<Value> {
        let mut args = self.args();
        args.extend(["--kube-version".to_owned(), version.to_owned()]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        tools
            .render(helm, &chart_directory(), &args)
            .unwrap_or_else(|error| panic!("{}: {error}", self.file))
    }
}

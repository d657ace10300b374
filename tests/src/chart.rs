//! The tools that a chart is checked with: Helm of two majors, kubectl, and the schemas of Kubernetes.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio},
    sync::Mutex,
};

use serde_json::{Value, json};

/// Names the directory of the tools; `./test` makes it.
pub const TOOLS_VARIABLE: &str = "SHIMMER_TEST_CHART_TOOLS";

/// Where the chart lies.
pub fn chart_directory() -> PathBuf {
    workspace().join("helm/shimmer")
}

fn workspace() -> PathBuf {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_directory.parent().expect("the crate lies in the workspace").to_path_buf()
}

/// A major of Helm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Helm {
    Three,
    Four,
}

impl Helm {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Three, Self::Four];
}

/// Helm, kubectl and the process that knows the schemas.
#[derive(Debug)]
pub struct Tools {
    directory: PathBuf,
    schemas: Mutex<Schemas>,
}

impl Tools {
    /// The tools, or nothing and a printed reason where they are not to be had.
    #[expect(
        clippy::print_stdout,
        reason = "what was skipped is for the person who reads the output"
    )]
    pub fn find() -> Option<Self> {
        let Some(directory) = env::var_os(TOOLS_VARIABLE).map(PathBuf::from) else {
            println!(
                "skipped: {TOOLS_VARIABLE} names no directory with helm3, helm4, kubectl and python; ./test makes it"
            );
            return None;
        };
        let schemas = Mutex::new(Schemas::start(&directory.join("venv/bin/python")));
        Some(Self { directory, schemas })
    }

    /// A Helm that sees no configuration of this machine.
    pub fn helm(&self, helm: Helm, home: &Path) -> Command {
        let name = match helm {
            Helm::Three => "helm3",
            Helm::Four => "helm4",
        };
        let mut command = self.command(name, home);
        for (variable, directory) in [
            ("HELM_CACHE_HOME", "cache"),
            ("HELM_CONFIG_HOME", "config"),
            ("HELM_DATA_HOME", "data"),
        ] {
            command.env(variable, home.join(directory));
        }
        command
    }

    /// A kubectl that sees no configuration of this machine.
    pub fn kubectl(&self, home: &Path) -> Command {
        self.command("kubectl", home)
    }

    fn command(&self, name: &str, home: &Path) -> Command {
        let mut command = Command::new(self.directory.join(name));
        command.env_clear().env("HOME", home).env("KUBECONFIG", home.join("kubeconfig"));
        command
    }

    /// Renders a chart as the release `rel` with these arguments: its objects, or what Helm says against it.
    ///
    /// # Errors
    /// Helm refuses.
    pub fn render(&self, helm: Helm, chart: &Path, args: &[&str]) -> Result<Vec<Value>, String> {
        self.render_release(helm, "rel", chart, args)
    }

    /// Renders a chart as a release of this name.
    ///
    /// # Errors
    /// Helm refuses.
    pub fn render_release(
        &self,
        helm: Helm,
        name: &str,
        chart: &Path,
        args: &[&str],
    ) -> Result<Vec<Value>, String> {
        let home = tempfile::tempdir().expect("a directory for Helm");
        let mut command = self.helm(helm, home.path());
        command.args(["template", name]).arg(chart).args(["--namespace", "models"]).args(args);
        let output = output(&mut command);
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(self.parse(&String::from_utf8(output.stdout).expect("Helm writes UTF-8")))
    }

    /// The documents of a YAML text.
    ///
    /// # Panics
    /// It is no YAML.
    pub fn parse(&self, yaml: &str) -> Vec<Value> {
        let mut answer = self.ask(&json!({ "yaml": yaml }));
        match answer["documents"].take() {
            Value::Array(documents) => documents,
            _ => panic!("{answer}"),
        }
    }

    /// Why an object does not fit the schema of a version of Kubernetes; absent where there is no schema of its kind.
    ///
    /// # Panics
    /// The schemas cannot be read.
    pub fn schema_findings(&self, object: &Value, version: &str) -> Option<Vec<String>> {
        let answer = self.ask(&json!({ "document": object, "version": version }));
        assert!(answer.get("error").is_none(), "{answer}");
        let reasons = answer["reasons"].as_array()?;
        let object = describe(object);
        let text = |reason: &Value| format!("{object}: {}", reason.as_str().unwrap_or_default());
        Some(reasons.iter().map(text).collect())
    }

    /// What kubectl's own types say against an object: quantities, for example, which no schema knows.
    pub fn decode_finding(&self, object: &Value) -> Option<String> {
        let home = tempfile::tempdir().expect("a directory for kubectl");
        let file = home.path().join("object.json");
        fs::write(&file, object.to_string()).expect("the object is written");
        let mut command = self.kubectl(home.path());
        command.args(["set", "env", "--local", "-o", "name", "A=B", "-f"]).arg(&file);
        let output = output(&mut command);
        (!output.status.success())
            .then(|| format!("{}: {}", describe(object), String::from_utf8_lossy(&output.stderr)))
    }

    fn ask(&self, question: &Value) -> Value {
        self.schemas.lock().expect("no test panics while it asks").ask(question)
    }
}

/// Kind and name of an object.
pub fn describe(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    format!("{} {}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

/// Runs a tool to its end.
///
/// # Panics
/// It cannot be started.
pub fn output(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output();
    output.unwrap_or_else(|error| panic!("{command:?} cannot be started: {error}"))
}

/// The process of `schemas.py`.
#[derive(Debug)]
struct Schemas {
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Schemas {
    fn start(python: &Path) -> Self {
        let mut child = Command::new(python)
            .arg(workspace().join("tests/chart/schemas.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{} cannot be started: {error}", python.display()));
        let questions = child.stdin.take().expect("a piped input");
        let answers = BufReader::new(child.stdout.take().expect("a piped output"));
        Self { child, questions, answers }
    }

    fn ask(&mut self, question: &Value) -> Value {
        writeln!(self.questions, "{question}").expect("the process of schemas reads");
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the process of schemas answers");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }
}

impl Drop for Schemas {
    fn drop(&mut self) {
        // It may have ended already.
        if self.child.kill().is_ok() {
            self.child.wait().expect("a child that was killed ends");
        }
    }
}

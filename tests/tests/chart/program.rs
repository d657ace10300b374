//! The program takes what the chart gives it.

use std::{collections::BTreeSet, process::Command};

use serde_json::Value;
use shimmer_tests::{
    chart::{Helm, Tools, chart_directory, describe},
    process::{shimmer_binary, without_variables},
};

use super::CASES;

/// What the kubelet puts in place of variables, besides the pod's address.
const VARIABLES: [(&str, &str); 2] = [("$(POD_NAME)", "rel-shimmer-0"), ("$(NODE_NAME)", "host-1")];

fn shimmer(args: &[&str]) -> (bool, String) {
    let mut command = Command::new(shimmer_binary());
    let output = without_variables(&mut command).args(args).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

fn has_command(name: &str) -> bool {
    let (_, help) = shimmer(&["--help"]);
    help.lines().any(|line| line.split_whitespace().next() == Some(name) && line.starts_with("  "))
}

/// What the program says against the arguments of the containers that run it.
pub(super) fn findings(objects: &[Value]) -> Vec<String> {
    let mut findings = Vec::new();
    let ipv6 = objects.iter().any(|object| object["spec"]["ipFamilies"][0] == "IPv6");
    let pod_ip = if ipv6 { "fd00::7" } else { "10.0.0.7" };
    for object in objects {
        let spec = match object["kind"].as_str() {
            Some("Deployment" | "StatefulSet") => &object["spec"]["template"]["spec"],
            Some("Pod") => &object["spec"],
            _ => continue,
        };
        let containers = ["initContainers", "containers"].map(|key| spec[key].as_array());
        for container in containers.into_iter().flatten().flatten() {
            if container["command"].is_null() {
                let said = against(container, pod_ip);
                findings.extend(said.map(|said| format!("{}: {said}", describe(object))));
            }
        }
    }
    findings
}

fn against(container: &Value, pod_ip: &str) -> Option<String> {
    let args: Vec<String> = container["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|arg| {
            let arg = arg.as_str().unwrap_or_else(|| panic!("{arg} is no text"));
            let arg = arg.replace("$(POD_IP)", pod_ip);
            VARIABLES.iter().fold(arg, |arg, (name, value)| arg.replace(name, value))
        })
        .collect();
    let command = args[0].as_str();
    if !has_command(command) {
        return Some(format!("there is no command {command}"));
    }
    let known = flag_definitions(command);
    let name = |arg: &str| arg.split('=').next().unwrap_or_default().to_owned();
    let mut given: Vec<&str> = args.iter().map(String::as_str).collect();
    if known.contains("--print-config") {
        given.push("--print-config");
        let (taken, said) = shimmer(&given);
        return (!taken).then_some(said);
    }
    let unknown = given.iter().find(|arg| arg.starts_with("--") && !known.contains(&name(arg)));
    unknown.map(|arg| format!("{command} has no flag {arg}"))
}

#[test]
fn the_program_takes_the_arguments_of_every_container() {
    let Some(tools) = Tools::find() else { return };
    for case in &CASES {
        let findings = findings(&case.render(&tools, Helm::Four, "1.37.0"));
        assert!(findings.is_empty(), "{}: {}", case.file, findings.join("\n"));
    }
}

/// Every setting that the schema lists is a flag, and every flag is a setting or set by the chart.
#[test]
fn the_settings_of_the_chart_are_the_flags_of_the_program() {
    let text = std::fs::read_to_string(chart_directory().join("values.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&text).unwrap();
    let shared = "--container --listen --id --drain-timeout --metrics-listen --tls-ca --tls-cert --tls-key --log \
        --log-format --cluster --etcd --etcd-ca --etcd-cert --etcd-key --etcd-user --etcd-password-file --lease \
        --advertise --config --print-config --help --otlp-endpoint --otlp-protocol --trace-sample";
    let serve = "--workers --model-name --drain-delay --journal --admin-listen --api-keys --api-tls-cert --api-tls-key";
    let worker = "--host-label --weight --ram --mirror --usage";
    for (command, definition, own) in
        [("serve", "serveSettings", serve), ("worker", "workerSettings", worker)]
    {
        let listed = schema["definitions"][definition]["properties"].as_object().unwrap();
        let settings: BTreeSet<String> = listed.keys().map(|key| format!("--{key}")).collect();
        let by_chart: BTreeSet<String> =
            [shared, own].into_iter().flat_map(str::split_whitespace).map(str::to_owned).collect();
        let known = flag_definitions(command);
        let unknown: Vec<_> = settings.difference(&known).collect();
        assert!(unknown.is_empty(), "shimmer {command} has no {unknown:?}");
        let forgotten: Vec<_> = known
            .iter()
            .filter(|flag| !settings.contains(*flag) && !by_chart.contains(*flag))
            .collect();
        assert!(
            forgotten.is_empty(),
            "the chart has no way to give {forgotten:?} to shimmer {command}"
        );
        let twice: Vec<_> = settings.intersection(&by_chart).collect();
        assert!(twice.is_empty(), "{twice:?} would be given twice");
    }
}

/// The flags that a command defines: the first word of a line, after a short form.
fn flag_definitions(command: &str) -> BTreeSet<String> {
    let (_, help) = shimmer(&[command, "--help"]);
    help.lines()
        .map(str::trim_start)
        .map(|line| line.strip_prefix("-h, ").unwrap_or(line))
        .filter(|line| line.starts_with("--"))
        .filter_map(|line| line.split([' ', '[', '=']).next())
        .map(str::to_owned)
        .collect()
}

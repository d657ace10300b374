//! The level "restricted" of the Pod Security Standards, rule by rule.

use serde_json::Value;

use super::{Pod, Release, items, text};

/// Kinds of volumes that the level knows.
const VOLUMES: [&str; 8] = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
];

pub(super) fn findings(release: &Release<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    for pod in &release.pods {
        let mut add = |finding: String| findings.push(format!("{}: {finding}", pod.name()));
        for shared in ["hostNetwork", "hostPID", "hostIPC"] {
            if pod.spec[shared] == true {
                add(format!("{shared} is not allowed"));
            }
        }
        for volume in items(&pod.spec["volumes"]) {
            let kinds = volume.as_object().into_iter().flatten().map(|(kind, _)| kind.as_str());
            for kind in kinds.filter(|kind| *kind != "name" && !VOLUMES.contains(kind)) {
                add(format!("volume {} is a {kind}", volume["name"]));
            }
        }
        if items(&pod.spec["securityContext"]["sysctls"]).next().is_some() {
            add("sysctls are not among the allowed ones".to_owned());
        }
        for container in pod.containers() {
            for finding in container_findings(pod, container) {
                add(format!("container {}: {finding}", text(&container["name"])));
            }
        }
    }
    findings
}

fn container_findings(pod: &Pod<'_>, container: &Value) -> Vec<String> {
    let (all, own) = (&pod.spec["securityContext"], &container["securityContext"]);
    // What a container says goes before what its pod says.
    let effective = |key: &str| if own[key].is_null() { &all[key] } else { &own[key] };
    let mut findings = Vec::new();
    if own["privileged"] == true {
        findings.push("privileged".to_owned());
    }
    if own["allowPrivilegeEscalation"] != false {
        findings.push("allowPrivilegeEscalation is not false".to_owned());
    }
    if effective("runAsNonRoot") != true {
        findings.push("runAsNonRoot is not true".to_owned());
    }
    if effective("runAsUser") == 0 {
        findings.push("runAsUser is 0".to_owned());
    }
    let seccomp = text(&effective("seccompProfile")["type"]);
    if !["RuntimeDefault", "Localhost"].contains(&seccomp) {
        findings.push(format!("seccompProfile is {seccomp:?}"));
    }
    let capabilities = &own["capabilities"];
    if !items(&capabilities["drop"]).any(|dropped| dropped == "ALL") {
        findings.push("capabilities are not dropped".to_owned());
    }
    if items(&capabilities["add"]).any(|added| added != "NET_BIND_SERVICE") {
        findings.push(format!("capabilities {} are added", capabilities["add"]));
    }
    if !own["procMount"].is_null() && own["procMount"] != "Default" {
        findings.push("procMount is not the default".to_owned());
    }
    let profile = text(&effective("appArmorProfile")["type"]);
    if !["", "RuntimeDefault", "Localhost"].contains(&profile) {
        findings.push(format!("appArmorProfile is {profile}"));
    }
    let selinux = effective("seLinuxOptions");
    let kinds = ["", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"];
    if !kinds.contains(&text(&selinux["type"]))
        || !selinux["user"].is_null()
        || !selinux["role"].is_null()
    {
        findings.push("seLinuxOptions are not among the allowed ones".to_owned());
    }
    if items(&container["ports"]).any(|port| port["hostPort"].as_u64().unwrap_or(0) != 0) {
        findings.push("a port of the host is taken".to_owned());
    }
    let probes = ["livenessProbe", "readinessProbe", "startupProbe"].iter();
    let actions = ["postStart", "preStop"].iter();
    let hosts = probes
        .flat_map(|probe| ["httpGet", "tcpSocket"].map(|kind| &container[*probe][kind]["host"]))
        .chain(actions.map(|action| &container["lifecycle"][*action]["httpGet"]["host"]));
    if hosts.into_iter().any(|host| !text(host).is_empty()) {
        findings.push("a probe asks another host".to_owned());
    }
    findings
}

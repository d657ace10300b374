//! What pods refer to is there: secrets, claims, volumes, accounts, variables.

use std::collections::BTreeSet;

use serde_json::Value;
use shimmer_tests::chart::describe;

use super::{Pod, Release, items, text};

pub(super) fn findings(release: &Release<'_>, outside: &[&str]) -> Vec<String> {
    let mut there: BTreeSet<String> = release.objects.iter().map(describe).collect();
    // cert-manager makes the secret of a certificate.
    let secrets = release.kind("Certificate").map(|made| text(&made["spec"]["secretName"]));
    there.extend(secrets.map(|name| format!("Secret {name}")));
    there.extend(outside.iter().map(|&name| name.to_owned()));
    let mut used = BTreeSet::new();
    let mut findings = Vec::new();
    for pod in &release.pods {
        for wanted in references(pod) {
            if !there.contains(&wanted) {
                findings.push(format!("{}: there is no {wanted}", pod.name()));
            }
            used.insert(wanted);
        }
        findings.extend(volume_findings(pod));
        findings.extend(variable_findings(pod));
    }
    let idle = outside.iter().filter(|name| !used.contains(**name));
    findings.extend(idle.map(|name| format!("nothing refers to {name}")));
    findings
}

fn references(pod: &Pod<'_>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut add = |kind: &str, name: &Value| {
        if let Some(name) = name.as_str() {
            found.insert(format!("{kind} {name}"));
        }
    };
    for volume in items(&pod.spec["volumes"]) {
        add("Secret", &volume["secret"]["secretName"]);
        add("ConfigMap", &volume["configMap"]["name"]);
        add("PersistentVolumeClaim", &volume["persistentVolumeClaim"]["claimName"]);
    }
    for container in pod.containers() {
        for source in items(&container["envFrom"]) {
            add("Secret", &source["secretRef"]["name"]);
            add("ConfigMap", &source["configMapRef"]["name"]);
        }
        for variable in items(&container["env"]) {
            add("Secret", &variable["valueFrom"]["secretKeyRef"]["name"]);
            add("ConfigMap", &variable["valueFrom"]["configMapKeyRef"]["name"]);
        }
    }
    for secret in items(&pod.spec["imagePullSecrets"]) {
        add("Secret", &secret["name"]);
    }
    add("ServiceAccount", &pod.spec["serviceAccountName"]);
    found
}

/// Every mount has its volume, every volume is mounted.
fn volume_findings(pod: &Pod<'_>) -> Vec<String> {
    let claims = items(&pod.owner["spec"]["volumeClaimTemplates"])
        .map(|claim| text(&claim["metadata"]["name"]));
    let volumes: BTreeSet<_> =
        items(&pod.spec["volumes"]).map(|volume| text(&volume["name"])).chain(claims).collect();
    let mut mounted = BTreeSet::new();
    let mut findings = Vec::new();
    for container in pod.containers() {
        let mut paths = BTreeSet::new();
        for mount in items(&container["volumeMounts"]) {
            if !volumes.contains(text(&mount["name"])) {
                findings.push(format!("{}: there is no volume {}", pod.name(), mount["name"]));
            }
            if !paths.insert(text(&mount["mountPath"])) {
                findings.push(format!("{}: two mounts at {}", pod.name(), mount["mountPath"]));
            }
            mounted.insert(text(&mount["name"]));
        }
    }
    let idle = volumes.difference(&mounted);
    findings.extend(idle.map(|name| format!("{}: nothing mounts volume {name}", pod.name())));
    findings
}

/// `$(NAME)` in arguments stays as it is where there is no such variable.
fn variable_findings(pod: &Pod<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    for container in pod.containers() {
        let known: BTreeSet<_> = items(&container["env"]).map(|env| text(&env["name"])).collect();
        for arg in items(&container["args"]).filter_map(Value::as_str) {
            for name in arg.split("$(").skip(1).filter_map(|rest| rest.split(')').next()) {
                if !known.contains(name) {
                    findings.push(format!("{}: {arg} needs the variable {name}", pod.name()));
                }
            }
        }
    }
    findings
}

//! Network policies name pods and ports that there are, and together allow exactly the flows of the architecture.

use std::collections::BTreeSet;

use serde_json::Value;
use shimmer_tests::chart::describe;

use super::{Pod, Release, items, labels, matches, text};

/// Who connects to whom at which port: clients and scrapers come from elsewhere.
const FLOWS: [(&str, &str, &str); 5] = [
    ("coordinator", "worker", "expert"),
    ("coordinator", "etcd", "client"),
    ("worker", "etcd", "client"),
    ("etcd", "etcd", "peer"),
    ("test", "coordinator", "grpc"),
];

pub(super) fn findings(release: &Release<'_>) -> Vec<String> {
    let policies: Vec<_> = release.kind("NetworkPolicy").collect();
    if policies.is_empty() {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for policy in &policies {
        findings.extend(policy_findings(release, policy));
    }
    let mut allowed = BTreeSet::new();
    for from in &release.pods {
        for to in &release.pods {
            for port in to.ports() {
                if may(&policies, from, to, port) {
                    allowed.insert((
                        component(from),
                        component(to),
                        text(&port["name"]).to_owned(),
                    ));
                }
            }
        }
    }
    let there = |name: &str| release.pods.iter().any(|pod| component(pod) == name);
    let expected: BTreeSet<_> = FLOWS
        .iter()
        .filter(|(from, to, _)| there(from) && there(to))
        .map(|&(from, to, port)| (from.to_owned(), to.to_owned(), port.to_owned()))
        .collect();
    findings.extend(expected.difference(&allowed).map(|flow| format!("nothing allows {flow:?}")));
    findings.extend(allowed.difference(&expected).map(|flow| format!("{flow:?} is allowed")));
    findings
}

fn component(pod: &Pod<'_>) -> String {
    pod.labels.get("app.kubernetes.io/component").cloned().unwrap_or_default()
}

fn policy_findings(release: &Release<'_>, policy: &Value) -> Vec<String> {
    let name = describe(policy);
    let spec = &policy["spec"];
    let own = release.selected(&labels(&spec["podSelector"]["matchLabels"]));
    let mut findings = Vec::new();
    if own.is_empty() {
        findings.push(format!("{name} is about no pod"));
    }
    if spec["policyTypes"].as_array().map(Vec::len) != Some(2) {
        findings.push(format!("{name} leaves one direction open"));
    }
    for rule in items(&spec["ingress"]) {
        for port in items(&rule["ports"]).map(|port| &port["port"]) {
            if !own.iter().all(|pod| pod.has_port(port)) {
                findings.push(format!("{name}: its pods have no port {port}"));
            }
        }
        if items(&rule["ports"]).next().is_none() {
            findings.push(format!("{name}: a rule without ports opens all of them"));
        }
    }
    for rule in items(&spec["egress"]) {
        let targets = items(&rule["to"])
            .filter(|peer| peer["namespaceSelector"].is_null() && peer["ipBlock"].is_null())
            .flat_map(|peer| release.selected(&labels(&peer["podSelector"]["matchLabels"])));
        for pod in targets {
            for port in items(&rule["ports"]).map(|port| &port["port"]) {
                if !pod.has_port(port) {
                    findings.push(format!("{name}: {} has no port {port}", pod.name()));
                }
            }
        }
        if items(&rule["ports"]).next().is_none() {
            findings.push(format!("{name}: a rule without ports opens all of them"));
        }
    }
    for peer in items(&spec["ingress"]).flat_map(|rule| items(&rule["from"])) {
        let ours = &peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"];
        if !ours.is_null()
            && release.selected(&labels(&peer["podSelector"]["matchLabels"])).is_empty()
        {
            findings.push(format!("{name}: a peer of this release is no pod of it"));
        }
    }
    findings
}

/// Whether both ends let a connection through. Ports by number alone, as those of DNS, are not of this release.
fn may(policies: &[&Value], from: &Pod<'_>, to: &Pod<'_>, port: &Value) -> bool {
    let about = |pod: &Pod<'_>| {
        let labels_of = pod.labels.clone();
        let is = move |policy: &&&Value| {
            matches(&labels(&policy["spec"]["podSelector"]["matchLabels"]), &labels_of)
        };
        policies.iter().filter(is).copied().collect::<Vec<_>>()
    };
    let (leaving, arriving) = (about(from), about(to));
    let opens = |rule: &Value, peers: &str, other: &Pod<'_>| {
        let peer = |peer: &Value| {
            peer["namespaceSelector"].is_null()
                && !peer["podSelector"].is_null()
                && matches(&labels(&peer["podSelector"]["matchLabels"]), &other.labels)
        };
        let named = items(&rule["ports"]).any(|own| own["port"] == port["name"]);
        named && (rule[peers].is_null() || items(&rule[peers]).any(peer))
    };
    let egress = leaving.is_empty()
        || leaving
            .iter()
            .any(|policy| items(&policy["spec"]["egress"]).any(|rule| opens(rule, "to", to)));
    let ingress = arriving.is_empty()
        || arriving
            .iter()
            .any(|policy| items(&policy["spec"]["ingress"]).any(|rule| opens(rule, "from", from)));
    egress && ingress
}

//! What neither Helm nor a schema sees: that the objects of a release fit each other.

mod names;
mod pods;
mod policies;
mod references;
mod restricted;
mod selectors;

use std::collections::BTreeMap;

use serde_json::Value;
use shimmer_tests::chart::describe;

use super::Case;

/// Everything that is wrong with the objects of a release, each with the rule that it breaks in front.
pub(super) fn findings(objects: &[Value], case: &Case) -> Vec<String> {
    let release = Release::of(objects);
    let mut findings = Vec::new();
    let mut add = |rule: &str, found: Vec<String>| {
        findings.extend(found.into_iter().map(|finding| format!("{rule}: {finding}")));
    };
    add("names", names::findings(&release));
    add("selectors", selectors::findings(&release));
    add("ports", selectors::port_findings(&release));
    add("references", references::findings(&release, case.outside));
    add("pods", pods::findings(&release));
    add("policies", policies::findings(&release));
    if case.restricted {
        add("restricted", restricted::findings(&release));
    }
    findings
}

/// Labels or a selector.
type Labels = BTreeMap<String, String>;

/// The objects, and the pods that they make.
struct Release<'a> {
    objects: &'a [Value],
    pods: Vec<Pod<'a>>,
}

/// The template of a workload's pods, or a pod.
struct Pod<'a> {
    /// What makes it.
    owner: &'a Value,
    labels: Labels,
    spec: &'a Value,
}

impl<'a> Release<'a> {
    fn of(objects: &'a [Value]) -> Self {
        let pods = objects
            .iter()
            .filter_map(|owner| {
                let template = match owner["kind"].as_str()? {
                    "Deployment" | "StatefulSet" | "Job" => &owner["spec"]["template"],
                    "Pod" => owner,
                    _ => return None,
                };
                let labels = labels(&template["metadata"]["labels"]);
                Some(Pod { owner, labels, spec: &template["spec"] })
            })
            .collect();
        Self { objects, pods }
    }

    fn kind(&self, kind: &'static str) -> impl Iterator<Item = &'a Value> {
        self.objects.iter().filter(move |object| object["kind"] == kind)
    }

    /// Pods with all of these labels.
    fn selected(&self, selector: &Labels) -> Vec<&Pod<'a>> {
        self.pods.iter().filter(|pod| matches(selector, &pod.labels)).collect()
    }
}

impl<'a> Pod<'a> {
    fn name(&self) -> String {
        describe(self.owner)
    }

    fn containers(&self) -> impl Iterator<Item = &'a Value> {
        items(&self.spec["initContainers"]).chain(items(&self.spec["containers"]))
    }

    fn main(&self) -> &'a Value {
        &self.spec["containers"][0]
    }

    fn ports(&self) -> impl Iterator<Item = &'a Value> {
        items(&self.spec["containers"]).flat_map(|container| items(&container["ports"]))
    }

    /// Whether a container has a port of this name or number.
    fn has_port(&self, port: &Value) -> bool {
        self.ports().any(|own| &own["name"] == port || &own["containerPort"] == port)
    }

    /// The value of a flag of the main container.
    fn flag(&self, name: &str) -> Option<&'a str> {
        let prefix = format!("--{name}=");
        items(&self.main()["args"])
            .filter_map(Value::as_str)
            .find_map(|arg| arg.strip_prefix(&prefix))
    }

    /// Whether it runs our program, not etcd.
    fn is_ours(&self) -> bool {
        self.main()["args"][0].as_str().is_some_and(|first| !first.starts_with('-'))
    }
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn labels(value: &Value) -> Labels {
    let entries = value.as_object().into_iter().flatten();
    entries.map(|(key, value)| (key.clone(), text(value).to_owned())).collect()
}

fn matches(selector: &Labels, labels: &Labels) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Bytes of a quantity of memory.
fn bytes(quantity: &Value) -> Option<u64> {
    let quantity = quantity.as_str()?;
    let end = quantity.find(|c: char| !c.is_ascii_digit()).unwrap_or(quantity.len());
    let unit = match &quantity[end..] {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1u64 << 40,
        _ => return None,
    };
    Some(quantity[..end].parse::<u64>().ok()? * unit)
}

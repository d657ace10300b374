//! What an API server would refuse: other types, names that cannot be, selectors of other pods, changes of what is fixed.

use serde_json::Value;

use crate::chart::Tools;

/// Fields that cannot change, by kind.
const FIXED: [(&str, &[&str]); 2] = [
    ("Deployment", &["/spec/selector"]),
    (
        "StatefulSet",
        &[
            "/spec/selector",
            "/spec/serviceName",
            "/spec/podManagementPolicy",
            "/spec/volumeClaimTemplates",
        ],
    ),
];

/// Why an object is not taken.
pub(super) fn reasons(
    tools: &Tools,
    version: &str,
    old: Option<&Value>,
    object: &Value,
) -> Vec<String> {
    let mut reasons = tools.schema_findings(object, version).unwrap_or_default();
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    if !is_name(name) {
        reasons.push(format!("metadata.name: {name:?} is no subdomain of RFC 1123"));
    }
    let labels = &object["spec"]["template"]["metadata"]["labels"];
    for (key, value) in object["spec"]["selector"]["matchLabels"].as_object().into_iter().flatten()
    {
        if !labels.is_null() && labels[key] != *value {
            reasons.push(format!("spec.template.metadata.labels: `selector` does not match {key}"));
        }
    }
    let fixed = FIXED
        .iter()
        .find(|(kind, _)| object["kind"] == *kind)
        .map_or(&[][..], |(_, fields)| fields);
    if let Some(old) = old {
        let changed = fixed.iter().filter(|field| old.pointer(field) != object.pointer(field));
        reasons.extend(changed.map(|field| format!("{field}: cannot be changed")));
    }
    reasons
}

fn is_name(name: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let part = |part: &str| {
        let inner = part.bytes().all(|byte| letter(byte) || byte == b'-');
        inner && part.bytes().next().is_some_and(letter) && part.bytes().last().is_some_and(letter)
    };
    name.len() <= 253 && name.split('.').all(part)
}

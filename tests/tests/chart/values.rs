//! values.yaml and its schema know the same keys.

use std::{collections::BTreeSet, fs};

use serde_json::Value;
use shimmer_tests::chart::{Tools, chart_directory};

/// Keys of values that hold whatever a user wants.
fn is_free(schema: &Value) -> bool {
    schema["additionalProperties"].is_object()
}

fn schema() -> Value {
    let text = fs::read_to_string(chart_directory().join("values.schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The schema that a reference leads to.
fn resolve<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    if let Some(name) = schema["$ref"].as_str() {
        return &root["definitions"][name.rsplit('/').next().unwrap()];
    }
    match &schema["allOf"][0] {
        Value::Null => schema,
        first => resolve(root, first),
    }
}

/// Every object in the schema, with the path to it.
fn objects<'a>(at: String, schema: &'a Value, found: &mut Vec<(String, &'a Value)>) {
    match schema {
        Value::Object(map) => {
            if schema["type"] == "object" {
                found.push((at.clone(), schema));
            }
            for (key, value) in map {
                objects(format!("{at}/{key}"), value, found);
            }
        }
        Value::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                objects(format!("{at}/{index}"), value, found);
            }
        }
        _ => {}
    }
}

#[test]
fn the_schema_refuses_unknown_keys_everywhere() {
    let schema = schema();
    let mut found = Vec::new();
    objects(String::new(), &schema, &mut found);
    assert!(found.len() > 40, "{} objects", found.len());
    // What Kubernetes itself defines (peers, tolerations, volumes), and Helm's own `global`.
    let of_kubernetes = [
        "/definitions/objects/items",
        "/properties/networkPolicy/properties/dns/properties/to/items",
        "/properties/global",
    ];
    for (path, object) in found {
        let closed = object["additionalProperties"] == false || is_free(object);
        let foreign = of_kubernetes.contains(&path.as_str())
            || path.ends_with("/affinity/additionalProperties");
        assert!(closed || foreign, "{path} takes any key");
    }
}

/// Compares one level and everything below it.
fn compare(root: &Value, at: &str, schema: &Value, values: &Value, findings: &mut Vec<String>) {
    let schema = resolve(root, schema);
    let Some(values) = values.as_object() else { return };
    if is_free(schema) {
        return;
    }
    let empty = serde_json::Map::new();
    let known = schema["properties"].as_object().unwrap_or(&empty);
    let (given, listed): (BTreeSet<_>, BTreeSet<_>) =
        (values.keys().collect(), known.keys().collect());
    for key in given.difference(&listed) {
        findings.push(format!("{at}.{key} has no schema"));
    }
    for (key, value) in values {
        compare(root, &format!("{at}.{key}"), &known[key], value, findings);
    }
    // A map that is empty by default holds differences or settings.
    for key in listed.difference(&given).filter(|_| !values.is_empty()) {
        let own = (at, key.as_str());
        if ![("", "global"), (".worker", "name")].contains(&own) {
            findings.push(format!("{at}.{key} has no default in values.yaml"));
        }
    }
}

#[test]
fn the_schema_and_the_values_have_the_same_keys() {
    let Some(tools) = Tools::find() else { return };
    let text = fs::read_to_string(chart_directory().join("values.yaml")).unwrap();
    let values = tools.parse(&text).remove(0);
    let schema = schema();
    let mut findings = Vec::new();
    compare(&schema, "", &schema, &values, &mut findings);
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

//! Patches of objects: RFC 7386, and Kubernetes' own kind, in which the entries of some lists have keys.

use serde_json::{Map, Value};

/// Keys of list entries, the first that an entry has: as in the types of Kubernetes, for the lists that the chart has.
const KEYS: [&str; 5] = ["containerPort", "mountPath", "port", "topologyKey", "name"];

/// Lists of objects without keys: they are replaced as a whole.
const WHOLE: [&str; 8] =
    ["ingress", "egress", "from", "to", "metrics", "tolerations", "volumeClaimTemplates", "items"];

/// Applies a JSON merge patch.
pub(super) fn merge(old: Value, patch: &Value) -> Value {
    apply(old, patch, false)
}

/// Applies a strategic merge patch.
pub(super) fn strategic(old: Value, patch: &Value) -> Value {
    apply(old, patch, true)
}

fn apply(old: Value, patch: &Value, strategic: bool) -> Value {
    let Value::Object(changes) = patch else { return patch.clone() };
    if changes.get("$patch").and_then(Value::as_str) == Some("replace") {
        return Value::Object(plain(changes));
    }
    let mut object = match old {
        Value::Object(object) => object,
        _ => Map::new(),
    };
    // What a strategic patch retains is all that may stay beside what it sets.
    if let Some(keys) = changes.get("$retainKeys").and_then(Value::as_array) {
        object.retain(|key, _| keys.iter().any(|kept| kept == key));
    }
    for (key, value) in changes.iter().filter(|(key, _)| !key.starts_with('$')) {
        let old = object.remove(key);
        let new = match (old, value) {
            (_, Value::Null) => continue,
            (Some(Value::Array(old)), Value::Array(new))
                if strategic && !WHOLE.contains(&key.as_str()) =>
            {
                let order = changes.get(&format!("$setElementOrder/{key}"));
                Value::Array(lists(old, new, order))
            }
            (old, value) => apply(old.unwrap_or(Value::Null), value, strategic),
        };
        object.insert(key.clone(), new);
    }
    for (key, order) in changes
        .iter()
        .filter_map(|(key, order)| Some((key.strip_prefix("$setElementOrder/")?, order)))
    {
        if let (None, Some(Value::Array(list))) = (changes.get(key), object.get_mut(key)) {
            *list = lists(std::mem::take(list), &[], Some(order));
        }
    }
    Value::Object(object)
}

fn plain(changes: &Map<String, Value>) -> Map<String, Value> {
    let own = changes.iter().filter(|(key, _)| !key.starts_with('$'));
    own.map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn key_of(entry: &Value) -> Option<(&'static str, &Value)> {
    KEYS.iter().find_map(|key| Some((*key, entry.get(key)?)))
}

/// Merges two lists: by key where entries have one, as a whole where not.
fn lists(mut old: Vec<Value>, new: &[Value], order: Option<&Value>) -> Vec<Value> {
    for entry in new {
        let Some((key, value)) = key_of(entry) else { return new.to_vec() };
        let position = old.iter().position(|other| other.get(key) == Some(value));
        let deleted = entry.get("$patch").and_then(Value::as_str) == Some("delete");
        match position {
            Some(index) if deleted => drop(old.remove(index)),
            Some(index) => old[index] = apply(old[index].take(), entry, true),
            None if deleted => {}
            None => old.push(apply(Value::Null, entry, true)),
        }
    }
    if let Some(Value::Array(order)) = order {
        let rank = |entry: &Value| {
            order.iter().position(|wanted| match key_of(wanted) {
                Some((key, value)) => entry.get(key) == Some(value),
                None => wanted == entry,
            })
        };
        old.retain(|entry| rank(entry).is_some());
        old.sort_by_key(rank);
    }
    old
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(old: Value, patch: &Value, expected: Value) {
        assert_eq!(strategic(old, patch), expected);
    }

    #[test]
    fn lists_are_merged_by_their_keys() {
        let old = json!({ "env": [{ "name": "A", "value": "1" }, { "name": "B", "value": "2" }], "args": ["x"] });
        let patch = json!({
            "$setElementOrder/env": [{ "name": "C" }, { "name": "A" }],
            "env": [{ "name": "A", "value": "3" }, { "name": "C", "value": "4" }, { "$patch": "delete", "name": "B" }],
            "args": ["y", "z"],
        });
        let expected = json!({ "env": [{ "name": "C", "value": "4" }, { "name": "A", "value": "3" }], "args": ["y", "z"] });
        check(old, &patch, expected);
    }

    #[test]
    fn what_is_not_retained_goes() {
        let old = json!({ "volumes": [{ "name": "v", "emptyDir": {} }] });
        let patch = json!({ "volumes": [{ "$retainKeys": ["hostPath", "name"], "name": "v", "hostPath": { "path": "/p" } }] });
        check(old, &patch, json!({ "volumes": [{ "name": "v", "hostPath": { "path": "/p" } }] }));
        check(json!({ "a": 1, "b": 2 }), &json!({ "a": null }), json!({ "b": 2 }));
    }
}

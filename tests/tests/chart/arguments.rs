//! What is given reaches Kubernetes and the program as it was written, and once.

use std::{collections::BTreeMap, fs};

use serde_json::{Value, json};
use shimmer_tests::chart::{Helm, Tools, chart_directory, describe};

use super::Case;

/// Texts that YAML takes for a truth, a number, a map or a comment where they stand without quotes.
fn deceptive() -> Value {
    json!({
        "fullnameOverride": "on",
        "nameOverride": "true",
        "clusterName": "12",
        "commonLabels": { "team": "012" },
        "commonAnnotations": { "since": "2024" },
        "image": { "pullSecrets": ["12"] },
        "model": { "name": "glm: 5", "directory": "a: b #c", "claim": { "name": "12" } },
        "log": { "filter": "info # x" },
        "coordinator": {
            "priorityClassName": "12",
            "journal": { "enabled": true, "existingClaim": "1e3" },
        },
        "api": { "keys": { "secretName": "12", "key": "1" }, "tls": { "secretName": "34" } },
        "tls": { "mode": "secret", "coordinatorSecretName": "12", "workerSecretName": "013" },
        "etcd": {
            "mode": "external",
            "external": {
                "endpoints": ["http://e:2379"],
                "auth": { "user": "a: b", "secretName": "12", "key": "true" },
            },
        },
        "serviceAccount": { "name": "007" },
        "rackAffinity": "true",
        "topologySpreadKeys": ["on"],
        "networkPolicy": { "monitoring": [{ "podSelector": {} }] },
        "metrics": { "podMonitor": { "enabled": true } },
        "pools": [
            {
                "name": "true",
                "hostLabel": "null",
                "runtimeClassName": "12",
                "gpu": { "count": 1, "types": ["12"], "typeLabel": "on" },
                "mirrors": [
                    { "name": "12", "hostPath": "/m: n", "directory": "x: y #z", "weight": 0.5 },
                    { "name": "13", "claimName": "12" },
                ],
                "state": { "type": "hostPath", "hostPath": { "path": "/s: t" } },
            },
            {
                "name": "12",
                "state": { "type": "claimTemplate", "claimTemplate": { "storageClassName": "12" } },
            },
        ],
    })
}

/// Labels and arguments that are no texts, wherever they stand.
fn no_texts(at: &str, value: &Value, found: &mut Vec<String>) {
    let maps = ["labels", "annotations", "matchLabels", "nodeSelector", "selector"];
    let lists = ["args", "command"];
    for (key, value) in value.as_object().into_iter().flatten() {
        let at = format!("{at}/{key}");
        let texts: Vec<&Value> = match value {
            Value::Object(map) if maps.contains(&key.as_str()) => map.values().collect(),
            Value::Array(list) if lists.contains(&key.as_str()) => list.iter().collect(),
            _ => Vec::new(),
        };
        // A selector may hold maps and lists, which are looked at on their own.
        let wrong = texts.iter().filter(|it| it.is_number() || it.is_boolean() || it.is_null());
        found.extend(wrong.map(|text| format!("{at}: {text}")));
        no_texts(&at, value, found);
    }
    for (index, value) in value.as_array().into_iter().flatten().enumerate() {
        no_texts(&format!("{at}/{index}"), value, found);
    }
}

fn args<'a>(objects: &'a [Value], object: &str) -> Vec<&'a str> {
    let found = objects.iter().find(|found| describe(found) == object);
    let found = found.unwrap_or_else(|| panic!("there is no {object}"));
    let args = &found["spec"]["template"]["spec"]["containers"][0]["args"];
    args.as_array().unwrap().iter().filter_map(Value::as_str).collect()
}

#[test]
fn texts_that_look_like_something_else_stay_texts() {
    let Some(tools) = Tools::find() else { return };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("values.json");
    fs::write(&file, deceptive().to_string()).unwrap();
    let values = format!("--values={}", file.display());
    for (helm, name) in [(Helm::Three, "12"), (Helm::Four, "12"), (Helm::Four, "true")] {
        let objects = tools.render_release(helm, name, &chart_directory(), &[&values]).unwrap();
        let mut found = Vec::new();
        for object in &objects {
            no_texts(&describe(object), object, &mut found);
            found.extend(tools.schema_findings(object, "1.37.0").unwrap_or_default());
            let labels = &object["metadata"]["labels"];
            assert_eq!(labels["app.kubernetes.io/instance"], name, "{}", describe(object));
            assert_eq!(labels["app.kubernetes.io/name"], "true", "{}", describe(object));
        }
        assert!(found.is_empty(), "{}", found.join("\n"));
        let coordinator = args(&objects, "Deployment on-coordinator");
        let worker = args(&objects, "StatefulSet on-true");
        let common = ["--container=/model/a: b #c", "--cluster=12", "--etcd-user=a: b"];
        for args in [&coordinator, &worker] {
            for wanted in common.iter().chain(&["--log=info # x"]) {
                assert!(args.contains(wanted), "{wanted} is not in {args:?}");
            }
        }
        assert!(coordinator.contains(&"--model-name=glm: 5"), "{coordinator:?}");
        for wanted in
            ["--host-label=null", "--mirror=/mirrors/12/x: y #z=0.5", "--mirror=/mirrors/13"]
        {
            assert!(worker.contains(&wanted), "{wanted} is not in {worker:?}");
        }
    }
}

/// The chart knows every flag that it gives, whatever it is given for.
#[test]
fn a_flag_that_the_chart_gives_is_refused_among_further_ones() {
    let Some(tools) = Tools::find() else { return };
    for (role, object) in [("coordinator", "Deployment"), ("worker", "StatefulSet")] {
        let mut given: BTreeMap<String, &Case> = BTreeMap::new();
        for case in ["glm5-values.yaml", "cpu-only-values.yaml"].map(Case::of) {
            let objects = case.render(&tools, Helm::Four, "1.37.0");
            let is_role = |found: &&Value| {
                found["kind"] == object
                    && found["metadata"]["labels"]["app.kubernetes.io/component"] == role
            };
            for found in objects.iter().filter(is_role) {
                let args = args(&objects, &describe(found)).into_iter();
                let flags = args.filter_map(|arg| arg.split_once('=')).map(|(flag, _)| flag);
                given.extend(flags.map(|flag| (flag.to_owned(), case)));
            }
        }
        // A worker may have several copies.
        given.remove("--mirror");
        assert!(given.len() > 15, "{role}: {given:?}", given = given.keys());
        for (flag, case) in given {
            let mut args = case.args();
            args.push(format!("--set={role}.extraArgs={{{flag}=1}}"));
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let said = tools.render(Helm::Four, &chart_directory(), &args).unwrap_err();
            assert!(said.contains(&format!("gives {flag} twice")), "{role} {flag}: {said}");
        }
    }
    let more = "--set=worker.extraArgs={--mirror=/a,--mirror=/b,--cap=9}";
    let objects = tools.render(Helm::Four, &chart_directory(), &[more]).unwrap();
    let worker = args(&objects, "StatefulSet rel-shimmer-default");
    assert!(worker.ends_with(&["--mirror=/a", "--mirror=/b", "--cap=9"]), "{worker:?}");
}

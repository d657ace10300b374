//! What clusters differ in: their version, their DNS, the system calls that their engines allow.

use std::collections::BTreeSet;

use serde_json::Value;
use shimmer_tests::chart::{Helm, Tools, chart_directory, describe};

use super::Case;

fn of_kind<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| object["kind"] == kind)
}

#[test]
fn pods_that_are_not_ready_do_not_hold_up_a_drain_from_kubernetes_1_27() {
    let Some(tools) = Tools::find() else { return };
    for (version, expected) in [("1.25.0", None), ("1.26.9", None), ("1.27.0", Some("AlwaysAllow"))]
    {
        let objects = Case::of("restricted-values.yaml").render(&tools, Helm::Four, version);
        let budgets: Vec<_> = of_kind(&objects, "PodDisruptionBudget").collect();
        assert_eq!(budgets.len(), 3, "coordinators, workers, etcd");
        for budget in budgets {
            let policy = budget["spec"]["unhealthyPodEvictionPolicy"].as_str();
            assert_eq!(policy, expected, "{version} {}", describe(budget));
        }
    }
}

#[test]
fn an_update_of_workers_waits_for_the_next_placement() {
    let Some(tools) = Tools::find() else { return };
    let own = "--set=pools[0].name=slow,pools[0].minReadySeconds=900,pools[1].name=usual";
    let objects = tools.render(Helm::Four, &chart_directory(), &[own]).unwrap();
    let given: Vec<_> = of_kind(&objects, "StatefulSet")
        .filter(|set| set["metadata"]["labels"]["app.kubernetes.io/component"] == "worker")
        .map(|set| (describe(set), set["spec"]["minReadySeconds"].as_u64()))
        .collect();
    // A worker that is away is replaced in the placement after 30 s.
    let expected = [("slow", 900), ("usual", 60)]
        .map(|(pool, seconds)| (format!("StatefulSet rel-shimmer-{pool}"), Some(seconds)));
    assert_eq!(given, expected);
}

#[test]
fn workers_alone_leave_the_default_profile_of_system_calls() {
    let Some(tools) = Tools::find() else { return };
    let free = "--set=worker.seccompProfile.type=Unconfined,worker.settings.io=uring";
    let unconfined = tools.render(Helm::Four, &chart_directory(), &[free]).unwrap();
    let localhost = Case::of("glm5-values.yaml").render(&tools, Helm::Four, "1.37.0");
    let path = Some("profiles/shimmer-worker.json");
    for (objects, expected) in
        [(unconfined, ("Unconfined", None)), (localhost, ("Localhost", path))]
    {
        let mut seen = BTreeSet::new();
        for object in &objects {
            let spec = match object["kind"].as_str() {
                Some("Deployment" | "StatefulSet") => &object["spec"]["template"]["spec"],
                Some("Pod") => &object["spec"],
                _ => continue,
            };
            let component = &object["metadata"]["labels"]["app.kubernetes.io/component"];
            let profile = &spec["securityContext"]["seccompProfile"];
            let found = (profile["type"].as_str().unwrap(), profile["localhostProfile"].as_str());
            let expected = if component == "worker" { expected } else { ("RuntimeDefault", None) };
            assert_eq!(found, expected, "{}", describe(object));
            seen.insert(component.as_str().unwrap());
        }
        assert_eq!(seen, BTreeSet::from(["coordinator", "worker", "etcd", "test"]));
    }
}

/// Rules by the number of a port: those of names, since everything else of this release has a name.
fn of_names(policy: &Value) -> Vec<(BTreeSet<String>, &Value)> {
    let rules = policy["spec"]["egress"].as_array().unwrap().iter();
    let by_number = rules.filter(|rule| rule["ports"][0]["protocol"] == "UDP");
    let ports = |rule: &Value| -> BTreeSet<String> {
        let ports = rule["ports"].as_array().unwrap().iter();
        let text =
            |port: &Value| format!("{}/{}", port["port"], port["protocol"].as_str().unwrap());
        ports.map(text).collect()
    };
    by_number.map(|rule| (ports(rule), &rule["to"])).collect()
}

#[test]
fn names_are_resolved_at_the_ports_and_by_the_pods_of_every_kind_of_dns() {
    let Some(tools) = Tools::find() else { return };
    let own =
        "--set=networkPolicy.dns.ports={5300},networkPolicy.dns.to[0].ipBlock.cidr=10.0.0.2/32";
    for (args, numbers, places) in [
        (&[][..], &["53", "5353"][..], &["kube-dns", "openshift-dns", "169.254.20.10/32"][..]),
        (&[own][..], &["5300"][..], &["10.0.0.2/32"][..]),
    ] {
        let objects = tools.render(Helm::Four, &chart_directory(), args).unwrap();
        let expected: BTreeSet<String> =
            numbers.iter().flat_map(|it| [format!("{it}/UDP"), format!("{it}/TCP")]).collect();
        let mut seen = 0;
        for policy in of_kind(&objects, "NetworkPolicy") {
            let rules = of_names(policy);
            let [(ports, to)] = rules.as_slice() else { panic!("{}: {rules:?}", describe(policy)) };
            assert_eq!(*ports, expected, "{}", describe(policy));
            assert_eq!(to.as_array().unwrap().len(), places.len(), "{to}");
            assert!(places.iter().all(|place| to.to_string().contains(place)), "{to}");
            seen += 1;
        }
        assert_eq!(seen, 4, "coordinators, workers, etcd and the test resolve names");
    }
}

//! `shimmer plan`.

use super::{check, container, text};

#[test]
fn plan_shows_what_would_be_done() {
    let directory = tempfile::tempdir().unwrap();
    let container = container(directory.path());
    let plan = |flags: &[&str]| {
        let flags = [&["plan", "--container", &container, "--json"], flags].concat();
        let line = text(&check(&flags, &[], 0, &[]).stdout);
        serde_json::from_str::<serde_json::Value>(&line).unwrap()["processes"].clone()
    };
    let all = plan(&[]);
    assert_eq!(all[0]["workers"][0]["experts"], 32);
    assert_eq!(all[0]["workers"][0]["pinned"], 32);
    let local = plan(&["--in-process", "--workers", "3", "--cap", "2"]);
    let workers = local[0]["workers"].as_array().unwrap();
    assert_eq!(workers.iter().map(|worker| worker["experts"].as_u64().unwrap()).sum::<u64>(), 32);
    assert!(workers.iter().all(|worker| worker["limit"] == "--cap"), "{local}");
    let names: Vec<&str> = local[0]["terms"]
        .as_array()
        .unwrap()
        .iter()
        .map(|term| term["name"].as_str().unwrap())
        .collect();
    assert!(names.starts_with(&["trunk", "KV pages"]) && names.contains(&"kept free"), "{names:?}");
    assert_eq!(plan(&["--worker-weights", "1,3"]).as_array().unwrap().len(), 2);
    let shown =
        text(&check(&["plan", "--container", &container, "--in-process"], &[], 0, &[]).stdout);
    for part in ["trunk", "tokenizer", "for experts", "RAM, pinned", "at its peak"] {
        assert!(shown.contains(part), "{shown}");
    }
    let refused = ["plan", "--container", &container, "--ram"];
    check(&[&refused[..], &["9000TiB"]].concat(), &[], 2, &["--ram 9000 TiB does not fit"]);
    check(&[&refused[..], &["1KiB"]].concat(), &[], 2, &["one expert of each of 2 layers"]);
    check(&[&refused[..], &["all", "--cap", "2"]].concat(), &[], 2, &["contradict"]);
}

use super::{
    arm::{ArmText, parse},
    cache::CacheState,
    report::{Results, Run, Spread},
};
use crate::{
    config::GenerateSettings,
    profile::{Moment, Profile},
};

fn check_arm(text: &str, expected: Result<&str, &str>) {
    let base = GenerateSettings {
        in_process: Some(true),
        container: Some("c".into()),
        ..GenerateSettings::default()
    };
    let found = text
        .parse::<ArmText>()
        .map_err(|error| error.to_string())
        .and_then(|arm| {
            let arms = parse(&base, &[arm, "other".parse().unwrap()]);
            arms.map_err(|error| error.to_string())
        })
        .map(|arms| {
            let tiers = &arms[0].cluster.tiers;
            let mirrors: Vec<String> =
                tiers.mirrors.iter().map(|mirror| mirror.dir.display().to_string()).collect();
            format!(
                "{} {} cap={:?} threads={} policy={} pilots={} pipeline={} mirrors={}",
                arms[0].name,
                arms[0].cluster.worker_weights.len(),
                tiers.cap,
                arms[0].cluster.threads,
                tiers.policy,
                tiers.pilot_workers,
                tiers.pipeline,
                mirrors.join("+"),
            )
        });
    match expected {
        Ok(expected) => assert_eq!(found.as_deref(), Ok(expected), "{text}"),
        Err(part) => {
            let error = found.expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}

#[test]
fn arms_change_keys_of_the_cluster() {
    check_arm(
        "a:cap=8,policy=lfru,pilot-workers=0,pipeline=off,threads=2,workers=3,mirror=/m",
        Ok("a 3 cap=Some(8) threads=2 policy=lfru pilots=0 pipeline=false mirrors=/m"),
    );
    check_arm(
        "b.2:threads=1",
        Ok("b.2 1 cap=None threads=1 policy=lru pilots=1 pipeline=true mirrors="),
    );
    check_arm(":cap=8", Err("is no arm"));
    check_arm("a b:cap=8", Err("is no arm"));
    check_arm("a:cap", Err("is no arm"));
    check_arm("a:cap=0", Err("cap=0"));
    check_arm("a:cap=many", Err("cap=many"));
    check_arm("a:policy=fifo", Err("lfru"));
    check_arm("a:temperature=1", Err("temperature is no key of an arm"));
    check_arm("a:endpoint=x:1", Err("endpoint is no key of an arm"));
    check_arm("other:cap=1", Err("two arms have the name other"));
    check_arm("a:pilot-workers=17", Err("arm a"));
}

#[test]
fn a_usage_file_is_never_written() {
    let base = GenerateSettings {
        in_process: Some(true),
        container: Some("c".into()),
        usage: Some("history".parse().unwrap()),
        ..GenerateSettings::default()
    };
    let arms = parse(&base, &["a".parse().unwrap(), "b:usage=other".parse().unwrap()]).unwrap();
    for arm in arms {
        assert!(arm.cluster.tiers.usage.unwrap().read_only);
    }
}

fn check_spread(values: &[f64], expected: Option<[f64; 3]>) {
    let found = Spread::of(values.iter().map(|&value| Some(value)));
    assert_eq!(found.map(|s| [s.least, s.median, s.most]), expected, "{values:?}");
}

#[test]
fn spreads_are_order_statistics() {
    check_spread(&[], None);
    check_spread(&[2.0], Some([2.0, 2.0, 2.0]));
    check_spread(&[3.0, 1.0], Some([1.0, 2.0, 3.0]));
    check_spread(&[9.0, 1.0, 2.0], Some([1.0, 2.0, 9.0]));
    assert_eq!(Spread::of([Some(1.0), None].into_iter()), None, "unknown is not zero");
}

#[test]
fn arms_that_give_different_bytes_fail() {
    let run = |sha256: &str| Run {
        profile: Profile::between(&Moment::default(), &Moment::default()),
        prefill_tokens_per_s: None,
        sha256: sha256.repeat(32),
        cached: None,
    };
    let base = GenerateSettings {
        in_process: Some(true),
        container: Some("c".into()),
        ..GenerateSettings::default()
    };
    let arms = parse(&base, &["a".parse().unwrap(), "b:cap=1".parse().unwrap()]).unwrap();
    let mut results = Results::new(&arms, CacheState::Warm);
    for (arm, sha256) in [(0, "aa"), (1, "aa"), (1, "aa")] {
        results.add(arm, run(sha256));
    }
    assert!(results.check().is_ok());
    assert!(results.table().contains("cache warm before each run"), "{}", results.table());
    results.add(0, run("bb"));
    let error = results.check().unwrap_err().render().unwrap();
    assert!(error.contains("the arms give different bytes") && error.contains("bbbb"), "{error}");
    assert_eq!(results.json()["same_bytes"], false);
}

//! Mistakes that are planted on purpose, as `tests/chart/mistakes.toml` lists them: each must be caught by the layer that
//! is there for it, in words that lead to it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use serde::Deserialize;
use serde_json::Value;
use shimmer_tests::chart::{Helm, Tools, chart_directory, describe, output};

use super::{Case, program, rules};

/// Who finds a mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Layer {
    /// Helm, of both majors.
    Lint,
    /// The schemas of Kubernetes.
    Schemas,
    /// kubectl's types.
    Types,
    /// Our own rules.
    Rules,
    /// The program, which is given the flags.
    Program,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mistakes {
    rendered: Vec<Rendered>,
    values: Vec<Refused>,
    chart: Vec<InChart>,
}

fn restricted() -> String {
    "restricted".to_owned()
}

/// A change of rendered objects.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rendered {
    #[serde(default = "restricted")]
    values: String,
    object: String,
    at: String,
    set: Option<Value>,
    layer: Layer,
    finding: String,
}

/// Values that Helm must refuse.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Refused {
    set: String,
    finding: String,
}

/// A change of the chart's files.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct InChart {
    #[serde(default = "cpu_only")]
    values: String,
    file: String,
    from: String,
    to: String,
    layer: Layer,
    finding: String,
}

fn cpu_only() -> String {
    "cpu-only".to_owned()
}

fn mistakes() -> Mistakes {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("chart/mistakes.toml");
    toml::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

impl Rendered {
    /// The objects with the mistake in them, and the object that it is in unless that is gone.
    fn plant(&self, objects: &[Value]) -> (Vec<Value>, Option<Value>) {
        let mut objects = objects.to_vec();
        let index = objects
            .iter()
            .position(|object| describe(object) == self.object)
            .unwrap_or_else(|| panic!("{}: there is no {}", self.values, self.object));
        if self.at.is_empty() {
            objects.remove(index);
            return (objects, None);
        }
        let (parent, key) = self.at.rsplit_once('/').expect("a pointer has a slash");
        let key = key.replace("~1", "/");
        let missing = || format!("{} has no {}", self.object, self.at);
        match (
            &self.set,
            objects[index].pointer_mut(parent).unwrap_or_else(|| panic!("{}", missing())),
        ) {
            (Some(value), Value::Object(map)) => {
                map.insert(key, value.clone());
            }
            (Some(value), Value::Array(list)) => {
                list[key.parse::<usize>().expect("an index")] = value.clone();
            }
            (None, Value::Object(map)) => {
                map.remove(&key).unwrap_or_else(|| panic!("{}", missing()));
            }
            (_, parent) => panic!("{}: {parent} cannot be changed so", self.at),
        }
        let changed = objects[index].clone();
        (objects, Some(changed))
    }
}

#[test]
fn each_mistake_in_what_is_rendered_is_found() {
    let Some(tools) = Tools::find() else { return };
    let mut rendered: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    let mut unfound = Vec::new();
    let mistakes = mistakes().rendered;
    for mistake in &mistakes {
        let case = Case::of(&format!("{}-values.yaml", mistake.values));
        let objects = rendered
            .entry(mistake.values.clone())
            .or_insert_with(|| case.render(&tools, Helm::Four, "1.37.0"));
        let (objects, changed) = mistake.plant(objects);
        let changed = changed.as_ref();
        let found: Vec<String> = match mistake.layer {
            Layer::Rules => rules::findings(&objects, case),
            Layer::Schemas => changed
                .and_then(|object| tools.schema_findings(object, "1.37.0"))
                .unwrap_or_default(),
            Layer::Types => {
                changed.and_then(|object| tools.decode_finding(object)).into_iter().collect()
            }
            layer => panic!("{layer:?} looks at charts"),
        };
        if !found.iter().any(|finding| finding.contains(&mistake.finding)) {
            unfound.push(format!("{mistake:?}: {found:#?}"));
        }
    }
    assert!(
        unfound.is_empty(),
        "{} of {} mistakes:\n{}",
        unfound.len(),
        mistakes.len(),
        unfound.join("\n")
    );
    let layers: BTreeSet<_> = mistakes.iter().map(|mistake| mistake.layer).collect();
    println!("{} planted mistakes were found by {layers:?}", mistakes.len());
}

#[test]
fn values_that_cannot_be_meant_are_refused_by_both_majors_of_helm() {
    let Some(tools) = Tools::find() else { return };
    let mut unfound = Vec::new();
    for refused in &mistakes().values {
        for helm in Helm::ALL {
            let set = format!("--set={}", refused.set);
            match tools.render(helm, &chart_directory(), &[&set]) {
                Err(error) if error.contains(&refused.finding) => {}
                Err(error) => unfound.push(format!("{helm:?} {refused:?}: {error}")),
                Ok(_) => unfound.push(format!("{helm:?} {refused:?} is rendered")),
            }
        }
    }
    assert!(unfound.is_empty(), "{}", unfound.join("\n"));
}

/// Copies the chart, so that its files can be changed.
pub(super) fn copy_chart(to: &Path) {
    copy(&chart_directory(), to);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

#[test]
fn each_mistake_in_the_chart_is_found() {
    let Some(tools) = Tools::find() else { return };
    let mut unfound = Vec::new();
    for mistake in &mistakes().chart {
        let copy = tempfile::tempdir().unwrap();
        let chart = copy.path().join("shimmer");
        copy_chart(&chart);
        let file = chart.join(&mistake.file);
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(&mistake.from), "{} has no {:?}", mistake.file, mistake.from);
        fs::write(&file, text.replace(&mistake.from, &mistake.to)).unwrap();
        let case = Case::of(&format!("{}-values.yaml", mistake.values));
        let found = found_in_chart(&tools, &chart, case, mistake.layer);
        if !found.iter().any(|finding| finding.contains(&mistake.finding)) {
            unfound.push(format!("{mistake:?}: {found:#?}"));
        }
    }
    assert!(unfound.is_empty(), "{}", unfound.join("\n"));
}

fn found_in_chart(tools: &Tools, chart: &Path, case: &Case, layer: Layer) -> Vec<String> {
    if layer == Layer::Lint {
        let lint = |helm| {
            let home = tempfile::tempdir().unwrap();
            let mut command = tools.helm(helm, home.path());
            let output = output(command.args(["lint", "--strict"]).arg(chart).args(case.args()));
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            if output.status.success() { String::new() } else { said }
        };
        // What only one of them finds is not found.
        let [three, four] = Helm::ALL.map(lint);
        return if three.is_empty() || four.is_empty() { Vec::new() } else { vec![three + &four] };
    }
    // Every set of values goes through the same templates; a bundled etcd is in some only.
    let mut found = Vec::new();
    for case in [case, Case::of("restricted-values.yaml")] {
        let args = case.args();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let objects = tools.render(Helm::Four, chart, &args).unwrap();
        match layer {
            Layer::Rules => found.extend(rules::findings(&objects, case)),
            Layer::Program => found.extend(program::findings(&objects)),
            _ => {
                let of = |object| tools.schema_findings(object, "1.37.0").unwrap_or_default();
                found.extend(objects.iter().flat_map(of));
            }
        }
    }
    found
}

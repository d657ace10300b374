//! The chart's README lists its values, made from the comments in values.yaml.

use std::{env, fs};

use shimmer_tests::chart::chart_directory;

/// Writes the table instead of comparing it.
const WRITE: &str = "SHIMMER_TEST_WRITE_README";
/// Between these lines the table stands.
const BEGIN: &str = "<!-- values: made from values.yaml -->";
const END: &str = "<!-- end of values -->";

struct Row {
    key: String,
    default: String,
    description: String,
}

/// The rows of a values file. A comment that begins with `# --` describes the key below it; a key without one holds others.
fn rows(text: &str) -> Vec<Row> {
    let lines: Vec<&str> = text.lines().collect();
    let (mut rows, mut path, mut description) = (Vec::new(), Vec::<(usize, String)>::new(), None);
    for (index, line) in lines.iter().enumerate() {
        let bare = line.trim_start();
        let depth = line.len() - bare.len();
        if let Some(comment) = bare.strip_prefix("# -- ") {
            description = Some(comment.to_owned());
            continue;
        }
        let Some((key, value)) = bare.split_once(':').filter(|_| !bare.starts_with(['#', '-']))
        else {
            continue;
        };
        // Keys below a described one belong to its default.
        if path.last().is_some_and(|(of, key)| *of < depth && key.is_empty()) {
            continue;
        }
        path.retain(|(of, _)| *of < depth);
        match description.take() {
            Some(description) => {
                let names: Vec<&str> =
                    path.iter().map(|(_, key)| key.as_str()).chain([key]).collect();
                let default = match value.trim() {
                    "" => block(&lines[index + 1..], depth),
                    value => value.to_owned(),
                };
                rows.push(Row { key: names.join("."), default, description });
                path.push((depth, String::new()));
            }
            None => path.push((depth, key.to_owned())),
        }
    }
    rows
}

/// A default of several lines, as one.
fn block(lines: &[&str], depth: usize) -> String {
    let below = lines.iter().take_while(|line| {
        let bare = line.trim_start();
        !bare.is_empty()
            && (line.len() - bare.len() > depth
                || (bare.starts_with('-') && line.len() - bare.len() >= depth))
    });
    below.map(|line| line.trim()).collect::<Vec<_>>().join("; ")
}

fn table(rows: &[Row]) -> String {
    let mut table = "| value | default | meaning |\n|---|---|---|\n".to_owned();
    for row in rows {
        let (key, default) = (&row.key, row.default.replace('|', "\\|"));
        table += &format!("| `{key}` | `{default}` | {} |\n", row.description.replace('|', "\\|"));
    }
    table
}

#[test]
fn the_readme_lists_every_value() {
    let values = fs::read_to_string(chart_directory().join("values.yaml")).unwrap();
    let rows = rows(&values);
    assert!(rows.len() > 100, "{} values", rows.len());
    let table = table(&rows);
    let path = chart_directory().join("README.md");
    let readme = fs::read_to_string(&path).unwrap();
    let (before, rest) = readme.split_once(BEGIN).expect("README.md has a place for the table");
    let (found, after) = rest.split_once(END).expect("the place has an end");
    if env::var_os(WRITE).is_some() {
        fs::write(&path, format!("{before}{BEGIN}\n{table}{END}{after}")).unwrap();
        return;
    }
    assert!(
        found.trim() == table.trim(),
        "helm/shimmer/README.md is not what values.yaml says: run this test with {WRITE}=1"
    );
}

#[test]
fn every_value_is_described() {
    let text = fs::read_to_string(chart_directory().join("values.yaml")).unwrap();
    let (mut before, mut block) = ("", usize::MAX);
    let mut plain = Vec::new();
    for line in text.lines() {
        let bare = line.trim_start();
        let depth = line.len() - bare.len();
        let described = before.trim_start().starts_with("# -- ");
        before = line;
        // What stands below a described key is its default.
        if depth > block || (bare.starts_with('-') && depth >= block) {
            continue;
        }
        block = if described && bare.ends_with(':') { depth } else { usize::MAX };
        let has_default = bare.split_once(": ").is_some() && !bare.starts_with(['#', '-']);
        if has_default && !described {
            plain.push(line);
        }
    }
    assert!(plain.is_empty(), "without a description:\n{}", plain.join("\n"));
}

#[test]
fn rows_know_their_path_and_default() {
    let text = "# -- A\na: 1\nb:\n  # -- C\n  c: \"x\"\n  d:\n    # -- E\n    e: {}\n# -- F\nf:\n  - name: g\n    h: 2\n# -- I\ni: 3\n";
    let found: Vec<_> = rows(text).into_iter().map(|row| (row.key, row.default)).collect();
    let expected =
        [("a", "1"), ("b.c", "\"x\""), ("b.d.e", "{}"), ("f", "- name: g; h: 2"), ("i", "3")];
    assert_eq!(found, expected.map(|(key, default)| (key.to_owned(), default.to_owned())));
}

//! The `SHIMMER_` variables: every one that is set must be known to some command.

use std::collections::BTreeSet;

/// Variables of the test suite and its scripts, which every process below them inherits.
const FOR_TESTS: &str = "SHIMMER_TEST_";

/// Variables that no flag has.
const WITHOUT_FLAG: [&str; 2] =
    [super::cluster::PASSWORD_VARIABLE, super::security::FETCH_TOKEN_VARIABLE];

/// A variable that no command reads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown environment variable {variable}; the known ones are {known}")]
pub struct EnvironmentError {
    pub variable: String,
    pub known: String,
}

/// Refuses a `SHIMMER_` variable that no command of `command` reads.
///
/// # Errors
/// Names the variable and lists the known ones.
pub fn check_environment(
    command: &clap::Command,
    variables: impl Iterator<Item = String>,
) -> Result<(), EnvironmentError> {
    let mut known: BTreeSet<String> = WITHOUT_FLAG.map(str::to_owned).into();
    collect(command, &mut known);
    known.insert(super::security::API_KEY_VARIABLE.to_owned());
    for variable in variables {
        let ours = variable.starts_with("SHIMMER_") && !variable.starts_with(FOR_TESTS);
        if ours && !known.contains(&variable) && !is_service_link(&variable) {
            let known = known.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(EnvironmentError { variable, known });
        }
    }
    Ok(())
}

fn collect(command: &clap::Command, known: &mut BTreeSet<String>) {
    known.extend(
        command
            .get_arguments()
            .filter_map(|arg| arg.get_env())
            .map(|name| name.to_string_lossy().into()),
    );
    for sub in command.get_subcommands() {
        collect(sub, known);
    }
}

/// Kubernetes gives every container variables for each service of its namespace (`SHIMMER_SERVICE_HOST`,
/// `SHIMMER_PORT_50051_TCP_ADDR`). They are no settings of ours, whatever the service is called.
fn is_service_link(variable: &str) -> bool {
    let words: Vec<&str> = variable.split('_').collect();
    let number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let ends = |tail: &[&str]| words.len() > tail.len() && words.ends_with(tail);
    if ends(&["SERVICE", "HOST"]) || ends(&["SERVICE", "PORT"]) || ends(&["PORT"]) {
        return true;
    }
    words.windows(2).any(|pair| pair == ["SERVICE", "PORT"])
        || words.windows(3).any(|triple| {
            triple[0] == "PORT" && number(triple[1]) && matches!(triple[2], "TCP" | "UDP" | "SCTP")
        })
}

//! A directory that a container is brought into: what may be there before, and who writes to it.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::error::{Error, Result};
use crate::files;
use crate::manifest::{MANIFEST_FILE, Manifest};

/// What `mkfs` leaves in the root of a volume.
const LOST_AND_FOUND: &str = "lost+found";

/// The directory is new, empty, holds the container with this digest, or was begun to be filled with it. `state` is the
/// name of the directory below it in which unfinished work stands, `kind` what it is to hold, for messages.
pub(crate) fn check(target: &Path, state: &str, digest: &str, kind: &str) -> Result<()> {
    let refuse =
        |problem: String, hint| Err(Error::Output { path: target.to_path_buf(), problem, hint });
    if !target.exists() {
        return Ok(());
    }
    let state = target.join(state);
    let place = if target.join(MANIFEST_FILE).exists() {
        target
    } else if state.join(MANIFEST_FILE).exists() {
        state.as_path()
    } else if state.exists() || files::names(target)?.iter().all(|name| name == LOST_AND_FOUND) {
        return Ok(());
    } else {
        let hint = "choose an empty or new directory";
        return refuse(format!("is not empty and no {kind}"), hint);
    };
    let found = Manifest::read(place)?.digest;
    if found == digest {
        return Ok(());
    }
    let problem = format!("holds another container ({found} instead of {digest})");
    refuse(problem, "choose another directory, or remove this one if you no longer need it")
}

/// Takes the lock of a state directory; `None` while another process has it. Dropping the file gives it back.
pub(crate) fn lock(state: &Path) -> Result<Option<File>> {
    let path = state.join("lock");
    loop {
        let file = match File::create(&path) {
            // Its last owner has just removed it.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                files::create_directory(state)?;
                continue;
            }
            created => created.map_err(Error::io("creating", &path))?,
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(source)) => {
                return Err(Error::Io { action: "locking", path, source });
            }
        }
        // Who ends its work removes the state directory: a lock on a file that has no name any more keeps nobody out.
        let held = file.metadata().map_err(Error::io("looking up", &path))?;
        match fs::metadata(&path) {
            Ok(named) if (named.dev(), named.ino()) == (held.dev(), held.ino()) => {
                return Ok(Some(file));
            }
            _ => files::create_directory(state)?,
        }
    }
}

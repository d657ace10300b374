//! One file from a container into a mirror, compared with the manifest on the way.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use crate::container::Container;
use crate::convert::ConvertProgress;
use crate::error::{Error, Result};
use crate::files;
use crate::parts::parts;

/// Bytes read, hashed and written at once.
const PIECE_BYTES: usize = 4 << 20;

/// Copies a file that the manifest lists. What is between its parts, headers and padding, is compared when the mirror is
/// opened.
pub(super) fn file(
    source: &Container,
    target: &Path,
    name: &str,
    progress: &dyn ConvertProgress,
) -> Result<()> {
    let (from, to) = (source.dir().join(name), target.join(name));
    let temporary = files::temporary(&to);
    let input = files::open(&from)?;
    let mut output = File::create(&temporary).map_err(Error::io("creating", &temporary))?;
    let mut copy = |offset: u64, bytes: u64| {
        let mut hasher = blake3::Hasher::new();
        let mut piece = vec![0; PIECE_BYTES];
        let mut done = 0;
        while done < bytes {
            if progress.stop() {
                return Err(Error::Stopped { path: target.to_path_buf() });
            }
            let size = usize::try_from(bytes - done).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            files::read_exact_at(&input, &mut piece[..size], offset + done)
                .map_err(Error::io("reading", &from))?;
            hasher.update(&piece[..size]);
            output.write_all(&piece[..size]).map_err(Error::io("writing", &temporary))?;
            done += size as u64;
            progress.advance(size as u64);
        }
        Ok(hasher.finalize().to_hex().to_string())
    };
    let manifest = source.manifest();
    let entry = manifest.files.iter().find(|entry| entry.file == name);
    let entry = entry.expect("a planned file is in the manifest");
    let mut at = 0;
    for part in parts(manifest, entry) {
        let gap = part.offset.checked_sub(at).expect("an opened container has no overlaps");
        copy(at, gap)?;
        let found = copy(part.offset, part.bytes)?;
        if found != part.digest {
            let expected = part.digest.to_owned();
            return Err(Error::Digest { file: from, what: part.name, expected, found });
        }
        at = part.offset + part.bytes;
    }
    copy(at, entry.bytes - at)?;
    files::publish(&output, &temporary, &to)
}

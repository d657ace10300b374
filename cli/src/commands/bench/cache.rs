//! The page cache before a run: brought into a state, then measured, because the system may ignore what it is asked for.

use std::{
    fs::File,
    io::{IoSliceMut, Read as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Advice, fadvise},
    io::{Errno, ReadWriteFlags, preadv2},
};

use crate::error::Error;

/// What the page cache holds of a container before a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CacheState {
    /// Nothing, as far as the system drops it.
    Cold,
    /// Everything, as far as it fits.
    Warm,
}

impl CacheState {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
        }
    }
}

/// Places of each file that are looked at: a share to one percent.
const PROBES: u64 = 128;

/// The files of a container and its copies.
#[derive(Debug)]
pub(super) struct Files {
    paths: Vec<PathBuf>,
}

impl Files {
    /// Every file below these directories.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub(super) fn of<'a>(directories: impl Iterator<Item = &'a PathBuf>) -> Result<Self, Error> {
        let mut paths = Vec::new();
        for directory in directories {
            collect(directory, &mut paths).map_err(|error| {
                Error::failed(format!("cannot list {}", directory.display()), error)
            })?;
        }
        paths.sort();
        Ok(Self { paths })
    }

    /// Brings the page cache into a state. The share of the files' pages that it holds afterwards; unknown where the
    /// file system cannot say.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn bring(&self, state: CacheState) -> Result<Option<f64>, Error> {
        let (mut held, mut looked) = (0, 0);
        for path in &self.paths {
            let failed = |error: std::io::Error| {
                Error::failed(format!("cannot prepare {}", path.display()), error)
            };
            let file = File::open(path).map_err(failed)?;
            match state {
                CacheState::Cold => drop_pages(&file).map_err(failed)?,
                CacheState::Warm => read_all(&file).map_err(failed)?,
            }
            let length = file.metadata().map_err(failed)?.len();
            let Some((of_file, probes)) = probe(&file, length).map_err(failed)? else {
                return Ok(None);
            };
            (held, looked) = (held + of_file, looked + probes);
            if state == CacheState::Cold {
                // The look itself may have brought pages in.
                drop_pages(&file).map_err(failed)?;
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "a share for people")]
        Ok((looked > 0).then(|| held as f64 / looked as f64))
    }
}

fn collect(directory: &Path, paths: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            collect(&entry.path(), paths)?;
        } else if kind.is_file() {
            paths.push(entry.path());
        }
    }
    Ok(())
}

fn drop_pages(file: &File) -> std::io::Result<()> {
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}

fn read_all(mut file: &File) -> std::io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

/// Places that are in the page cache, and places looked at: a read that must not wait fails where it would have to.
fn probe(file: &File, length: u64) -> std::io::Result<Option<(u64, u64)>> {
    let mut held = 0;
    let probes = PROBES.min(length.div_ceil(4096));
    for index in 0..probes {
        let offset = u64::try_from(u128::from(length) * u128::from(index) / u128::from(probes))
            .expect("below a length in u64");
        let mut byte = [0; 1];
        match preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => held += 1,
            Err(Errno::AGAIN) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some((held, probes)))
}

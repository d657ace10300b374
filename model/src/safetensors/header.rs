//! Parsing and checking of a safetensors header. All sizes are 64-bit and checked; nothing is allocated by a number
//! from the file before that number has been compared with the file's length.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::Path;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, de};

use crate::error::{Error, Result};
use crate::files;

/// Longest header that is read: the limit of the format's reference reader, so that a file accepted here opens there.
pub(crate) const HEADER_LIMIT: u64 = 100_000_000;

const AGAIN: &str = "the file is damaged or hostile: download it again";
const CUT: &str = "the file is cut short: download it again";

/// Element types of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    non_camel_case_types,
    clippy::upper_case_acronyms,
    reason = "spelled as in the files, so that messages match what tools show"
)]
pub(crate) enum DType {
    BOOL,
    U8,
    I8,
    F8_E4M3,
    F8_E5M2,
    F8_E8M0,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl DType {
    const ALL: [Self; 16] = [
        Self::BOOL,
        Self::U8,
        Self::I8,
        Self::F8_E4M3,
        Self::F8_E5M2,
        Self::F8_E8M0,
        Self::U16,
        Self::I16,
        Self::F16,
        Self::BF16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::BOOL | Self::U8 | Self::I8 | Self::F8_E4M3 | Self::F8_E5M2 | Self::F8_E8M0 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.to_string() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// Type, shape and place of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorInfo {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    start: u64,
    end: u64,
}

impl TensorInfo {
    /// First byte, counted from the end of the header.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// A checked header: tensors tile the data exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    tensors: BTreeMap<String, TensorInfo>,
    data_start: u64,
    /// blake3 of the header's bytes: identifies names, types, shapes and places.
    digest: blake3::Hash,
}

impl Header {
    pub(crate) fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    pub(crate) fn data_start(&self) -> u64 {
        self.data_start
    }

    pub(crate) fn digest(&self) -> blake3::Hash {
        self.digest
    }
}

/// Reads the header of a file of `length` bytes.
pub(super) fn read(file: &File, path: &Path, length: u64) -> Result<Header> {
    let fault = Fault { path };
    if length < 8 {
        return Err(Error::FileLength {
            file: path.to_path_buf(),
            expected: 8,
            found: length,
            hint: CUT,
        });
    }
    let mut prefix = [0; 8];
    files::read_exact_at(file, &mut prefix, 0).map_err(Error::io("reading", path))?;
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > HEADER_LIMIT {
        let problem =
            format!("its length of {header_bytes} bytes is above the limit of {HEADER_LIMIT}");
        return Err(fault.header(
            None,
            problem,
            "split the tensors over more files, or download the file again",
        ));
    }
    let data_start = 8 + header_bytes;
    if data_start > length {
        return Err(Error::FileLength {
            file: path.to_path_buf(),
            expected: data_start,
            found: length,
            hint: CUT,
        });
    }
    let size = usize::try_from(header_bytes).expect("the limit is far below 2^32");
    let mut text = vec![0; size];
    files::read_exact_at(file, &mut text, 8).map_err(Error::io("reading", path))?;
    parse(path, &text, length - data_start)
}

/// The same for a file in memory.
pub(super) fn parse_file<'a>(path: &Path, bytes: &'a [u8]) -> Result<(Header, &'a [u8])> {
    let cut = |expected| Error::FileLength {
        file: path.to_path_buf(),
        expected,
        found: bytes.len() as u64,
        hint: CUT,
    };
    let (prefix, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| cut(8))?;
    let header_bytes = u64::from_le_bytes(*prefix);
    let split = usize::try_from(header_bytes).ok().and_then(|size| rest.split_at_checked(size));
    let (text, data) = split.ok_or_else(|| cut(header_bytes.saturating_add(8)))?;
    Ok((parse(path, text, data.len() as u64)?, data))
}

/// Checks the text of a header in front of `data_bytes` bytes of data.
pub(super) fn parse(path: &Path, text: &[u8], data_bytes: u64) -> Result<Header> {
    let fault = Fault { path };
    let entries: Entries = serde_json::from_slice(text)
        .map_err(|error| fault.header(None, format!("not the JSON of a header: {error}"), AGAIN))?;
    let mut tensors = BTreeMap::new();
    for (name, entry) in entries.0 {
        let info = fault.entry(&name, entry)?;
        if tensors.contains_key(&name) {
            return Err(fault.header(Some(&name), "the name occurs twice".to_owned(), AGAIN));
        }
        tensors.insert(name, info);
    }
    fault.tiling(&tensors, data_bytes, 8 + text.len() as u64)?;
    Ok(Header { tensors, data_start: 8 + text.len() as u64, digest: blake3::hash(text) })
}

/// Builds errors of one file.
struct Fault<'a> {
    path: &'a Path,
}

impl Fault<'_> {
    fn header(&self, tensor: Option<&str>, problem: String, hint: &'static str) -> Error {
        Error::Header {
            file: self.path.to_path_buf(),
            tensor: tensor.map(str::to_owned),
            problem,
            hint,
        }
    }

    fn entry(&self, name: &str, entry: Entry) -> Result<TensorInfo> {
        let [start, end] = entry.data_offsets;
        let Some(dtype) = DType::parse(&entry.dtype) else {
            let problem = format!("data type {:?} is not known", entry.dtype);
            return Err(self.header(Some(name), problem, "a newer version may read this file"));
        };
        if end < start {
            return Err(self.header(
                Some(name),
                format!("data ends at {end}, before its start {start}"),
                AGAIN,
            ));
        }
        let expected =
            entry.shape.iter().try_fold(dtype.bytes(), |product, &n| product.checked_mul(n));
        match expected {
            Some(bytes) if bytes == end - start => {
                Ok(TensorInfo { dtype, shape: entry.shape, start, end })
            }
            Some(bytes) => {
                let problem = format!(
                    "{dtype} {:?} takes {bytes} bytes, its offsets hold {}",
                    entry.shape,
                    end - start
                );
                Err(self.header(Some(name), problem, AGAIN))
            }
            None => Err(self.header(
                Some(name),
                format!("the size of {dtype} {:?} overflows 64 bits", entry.shape),
                AGAIN,
            )),
        }
    }

    /// Tensors in the order of their data must follow one another without hole or overlap and end with the file.
    fn tiling(
        &self,
        tensors: &BTreeMap<String, TensorInfo>,
        data_bytes: u64,
        data_start: u64,
    ) -> Result<()> {
        let mut order: Vec<(&String, &TensorInfo)> = tensors.iter().collect();
        order.sort_by_key(|(_, info)| (info.start, info.end));
        let mut at = 0;
        let mut before = "the beginning";
        for (name, info) in order {
            if info.start < at {
                let problem =
                    format!("its data at {} overlaps {before}, which ends at {at}", info.start);
                return Err(self.header(Some(name), problem, AGAIN));
            }
            if info.start > at {
                let problem = format!(
                    "{} bytes between {before} and its data belong to no tensor",
                    info.start - at
                );
                return Err(self.header(Some(name), problem, AGAIN));
            }
            at = info.end;
            before = name;
        }
        if at == data_bytes {
            return Ok(());
        }
        let hint = if at > data_bytes {
            CUT
        } else {
            "bytes follow the last tensor: download the file again"
        };
        // A crafted offset near 2^64 is refused like any other length.
        let (expected, found) =
            (data_start.saturating_add(at), data_start.saturating_add(data_bytes));
        Err(Error::FileLength { file: self.path.to_path_buf(), expected, found, hint })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The entries of a header in file order, duplicates kept.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let entry = map.next_value().map_err(|error| {
                            de::Error::custom(format!("tensor {name}: {error}"))
                        })?;
                        entries.push((name, entry));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

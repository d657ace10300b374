//! GGUF version 3: metadata and tensors of the types that the demo's source has, checked strictly.
//!
//! Nothing is allocated by a number from the file before that number has been compared with the bytes that are left, and
//! every tensor must lie inside the file and apart from the others.

mod cursor;
mod dequantise;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files;
use cursor::Cursor;

const MAGIC: u32 = u32::from_le_bytes(*b"GGUF");
const VERSION: u32 = 3;
const DEFAULT_ALIGNMENT: u64 = 32;
const DAMAGED: &str = "the file is damaged or hostile: download it again";

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Any float.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text.
    Text(String),
    /// Values of one type.
    List(Vec<GgufValue>),
}

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufType {
    /// Plain.
    F32,
    /// Plain.
    F16,
    /// Plain.
    Bf16,
    /// Blocks of 32: f16 scale, 4-bit values minus 8.
    Q4_0,
    /// Blocks of 32: f16 scale, f16 minimum, 4-bit values.
    Q4_1,
    /// Blocks of 32: f16 scale, 8-bit values.
    Q8_0,
}

impl GgufType {
    fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Elements and bytes of a block.
    fn block(self) -> (u64, u64) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q8_0 => (32, 34),
        }
    }
}

/// A tensor of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Dimensions, the slowest first (the file has them the other way round).
    pub shape: Vec<usize>,
    /// Element type.
    pub kind: GgufType,
    /// First byte in the file.
    start: u64,
    bytes: u64,
}

/// An opened GGUF file.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    data: Data,
    metadata: BTreeMap<String, GgufValue>,
    tensors: BTreeMap<String, GgufTensor>,
}

/// Where the bytes are.
#[derive(Debug)]
enum Data {
    File(File, u64),
    Memory(Vec<u8>),
}

impl Data {
    fn length(&self) -> u64 {
        match self {
            Self::File(_, length) => *length,
            Self::Memory(bytes) => bytes.len() as u64,
        }
    }

    /// Reads inside the bounds, which the caller has checked.
    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        match self {
            Self::File(file, _) => files::read_exact_at(file, out, offset),
            Self::Memory(bytes) => {
                let from =
                    usize::try_from(offset).map_err(|_| std::io::ErrorKind::UnexpectedEof)?;
                let end = from.checked_add(out.len()).ok_or(std::io::ErrorKind::UnexpectedEof)?;
                out.copy_from_slice(bytes.get(from..end).ok_or(std::io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }
}

impl Gguf {
    /// Opens a file and checks its structure.
    pub fn open(path: &Path) -> Result<Self> {
        let file = files::open(path)?;
        let length = files::length(&file, path)?;
        Self::parse(path, Data::File(file, length))
    }

    /// The same for a file in memory; `path` is for messages.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self> {
        Self::parse(path, Data::Memory(bytes))
    }

    fn parse(path: &Path, data: Data) -> Result<Self> {
        let mut cursor = Cursor::new(path, &data);
        if cursor.u32()? != MAGIC {
            return Err(cursor.fault(None, "it does not begin with GGUF", "give a GGUF file"));
        }
        let version = cursor.u32()?;
        if version != VERSION {
            let problem = format!("version {version} is not {VERSION}");
            return Err(cursor.fault(
                None,
                problem,
                "convert the file to version 3, little endian",
            ));
        }
        // The shortest tensor entry and the shortest metadata entry: name length, and the smallest rest.
        let tensor_count = cursor.count(8 + 4 + 4 + 8)?;
        let value_count = cursor.count(8 + 4 + 1)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..value_count {
            let key = cursor.text()?;
            let value = cursor.value()?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(cursor.fault(
                    None,
                    format!("metadata key {key} occurs twice"),
                    DAMAGED,
                ));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(GgufValue::Unsigned(n)) if n.is_power_of_two() && *n <= 1 << 20 => *n,
            Some(other) => {
                return Err(cursor.fault(None, format!("general.alignment is {other:?}"), DAMAGED));
            }
        };
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let (name, tensor) = cursor.tensor(alignment)?;
            if tensors.contains_key(&name) {
                return Err(cursor.fault(Some(&name), "the name occurs twice", DAMAGED));
            }
            tensors.insert(name, tensor);
        }
        let data_start = cursor.at().checked_next_multiple_of(alignment);
        let data_start =
            data_start.ok_or_else(|| cursor.fault(None, "the header is too long", DAMAGED))?;
        place(&cursor, &mut tensors, data_start)?;
        Ok(Self { path: path.to_path_buf(), metadata, tensors, data })
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All metadata.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.metadata
    }

    /// All tensors.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// A whole number of the metadata.
    pub fn number(&self, key: &str) -> Result<u64> {
        match self.metadata.get(key) {
            Some(GgufValue::Unsigned(number)) => Ok(*number),
            Some(GgufValue::Signed(number)) if *number >= 0 => Ok(number.unsigned_abs()),
            other => Err(self.wrong(key, "a whole number", other)),
        }
    }

    /// A text of the metadata.
    pub fn text(&self, key: &str) -> Result<&str> {
        match self.metadata.get(key) {
            Some(GgufValue::Text(text)) => Ok(text),
            other => Err(self.wrong(key, "a text", other)),
        }
    }

    /// A list of the metadata.
    pub fn list(&self, key: &str) -> Result<&[GgufValue]> {
        match self.metadata.get(key) {
            Some(GgufValue::List(list)) => Ok(list),
            other => Err(self.wrong(key, "a list", other)),
        }
    }

    /// Dequantises a tensor of the given shape.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(tensor) = self.tensors.get(name) else {
            return Err(self.fault(
                Some(name),
                "there is no such tensor".to_owned(),
                "give the file of another model",
            ));
        };
        if tensor.shape != shape {
            let problem = format!("its shape is {:?}, expected {shape:?}", tensor.shape);
            return Err(self.fault(Some(name), problem, "give the file of another model"));
        }
        let size = usize::try_from(tensor.bytes)
            .map_err(|_| self.fault(Some(name), "too large".to_owned(), DAMAGED))?;
        let mut bytes = vec![0; size];
        self.data.read(tensor.start, &mut bytes).map_err(Error::io("reading", &self.path))?;
        let values = dequantise::values(tensor.kind, &bytes);
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(element) => {
                let (file, tensor) = (self.path.clone(), name.to_owned());
                Err(Error::NotFinite { file, tensor, element: element as u64 })
            }
        }
    }

    fn wrong(&self, key: &str, wanted: &str, found: Option<&GgufValue>) -> Error {
        let problem = match found {
            None => format!("metadata key {key} is missing"),
            Some(_) => format!("metadata key {key} is not {wanted}"),
        };
        self.fault(None, problem, "give the file of another model")
    }

    fn fault(&self, tensor: Option<&str>, problem: String, hint: &'static str) -> Error {
        Error::Gguf { file: self.path.clone(), tensor: tensor.map(str::to_owned), problem, hint }
    }
}

/// Turns offsets from the start of the data into places in the file, which must exist and be apart.
fn place(
    cursor: &Cursor<'_>,
    tensors: &mut BTreeMap<String, GgufTensor>,
    data_start: u64,
) -> Result<()> {
    let mut spans = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors.iter_mut() {
        let start = tensor.start.checked_add(data_start);
        let end = start.and_then(|start| start.checked_add(tensor.bytes));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(cursor.fault(Some(name), "its place overflows 64 bits", DAMAGED));
        };
        if end > cursor.length() {
            let problem = format!("its data ends at {end}, the file at {}", cursor.length());
            return Err(cursor.fault(
                Some(name),
                problem,
                "the file is cut short: download it again",
            ));
        }
        tensor.start = start;
        spans.push((start, end, name.as_str()));
    }
    spans.sort_unstable();
    match spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        None => Ok(()),
        Some(pair) => {
            Err(cursor.fault(Some(pair[1].2), format!("its data overlaps {}", pair[0].2), DAMAGED))
        }
    }
}

#[cfg(test)]
mod tests;

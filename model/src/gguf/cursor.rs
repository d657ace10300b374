//! Bounded reading of a GGUF header.

use std::path::Path;

use super::{DAMAGED, Data, GgufTensor, GgufType, GgufValue};
use crate::error::{Error, Result};

/// Lists in lists deeper than this are refused; no published file has any.
const DEPTH_MAX: usize = 2;
const DIMENSIONS_MAX: u32 = 4;
const PIECE_BYTES: usize = 64 << 10;

/// Reads forward through the bytes of a file.
pub(super) struct Cursor<'a> {
    path: &'a Path,
    data: &'a Data,
    at: u64,
    /// Bytes of the file from `piece_start` on.
    piece: Vec<u8>,
    piece_start: u64,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(path: &'a Path, data: &'a Data) -> Self {
        Self { path, data, at: 0, piece: Vec::new(), piece_start: 0 }
    }

    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn length(&self) -> u64 {
        self.data.length()
    }

    pub(super) fn fault(
        &self,
        tensor: Option<&str>,
        problem: impl Into<String>,
        hint: &'static str,
    ) -> Error {
        let (file, tensor) = (self.path.to_path_buf(), tensor.map(str::to_owned));
        Error::Gguf { file, tensor, problem: problem.into(), hint }
    }

    fn left(&self) -> u64 {
        self.data.length() - self.at
    }

    /// The next `size` bytes, which must be there.
    fn bytes(&mut self, size: u64) -> Result<&[u8]> {
        if size > self.left() {
            let problem =
                format!("the header goes on beyond the end of the file at {}", self.data.length());
            return Err(self.fault(None, problem, "the file is cut short: download it again"));
        }
        let (at, size) = (self.at, usize::try_from(size).expect("not longer than a file in reach"));
        let inside = at - self.piece_start;
        if inside + size as u64 > self.piece.len() as u64 {
            let wanted =
                size.max(PIECE_BYTES).min(usize::try_from(self.left()).unwrap_or(usize::MAX));
            self.piece.resize(wanted, 0);
            self.piece_start = at;
            self.data.read(at, &mut self.piece).map_err(Error::io("reading", self.path))?;
        }
        self.at += size as u64;
        let from = usize::try_from(at - self.piece_start).expect("inside the piece");
        Ok(&self.piece[from..from + size])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.bytes(N as u64)?;
        Ok(bytes.try_into().expect("as many bytes as asked for"))
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A number of things of at least `size` bytes each.
    pub(super) fn count(&mut self, size: u64) -> Result<u64> {
        let count = self.u64()?;
        if count.checked_mul(size).is_none_or(|bytes| bytes > self.left()) {
            return Err(self.fault(
                None,
                format!("{count} entries do not fit the rest of the file"),
                DAMAGED,
            ));
        }
        Ok(count)
    }

    pub(super) fn text(&mut self) -> Result<String> {
        let length = self.count(1)?;
        let bytes = self.bytes(length)?.to_vec();
        String::from_utf8(bytes).map_err(|_| self.fault(None, "a text is not UTF-8", DAMAGED))
    }

    pub(super) fn value(&mut self) -> Result<GgufValue> {
        let kind = self.u32()?;
        self.value_of(kind, 0)
    }

    fn value_of(&mut self, kind: u32, depth: usize) -> Result<GgufValue> {
        Ok(match kind {
            0 => GgufValue::Unsigned(u8::from_le_bytes(self.array()?).into()),
            1 => GgufValue::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => GgufValue::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => GgufValue::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => GgufValue::Unsigned(self.u32()?.into()),
            5 => GgufValue::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => GgufValue::Float(f32::from_le_bytes(self.array()?).into()),
            7 => match self.array::<1>()? {
                [0] => GgufValue::Bool(false),
                [1] => GgufValue::Bool(true),
                [other] => {
                    return Err(self.fault(None, format!("{other} is no truth value"), DAMAGED));
                }
            },
            8 => GgufValue::Text(self.text()?),
            9 if depth < DEPTH_MAX => {
                let kind = self.u32()?;
                let count = self.count(smallest(kind))?;
                GgufValue::List(
                    (0..count).map(|_| self.value_of(kind, depth + 1)).collect::<Result<_>>()?,
                )
            }
            10 => GgufValue::Unsigned(self.u64()?),
            11 => GgufValue::Signed(i64::from_le_bytes(self.array()?)),
            12 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            other => {
                return Err(self.fault(
                    None,
                    format!("metadata type {other} is not known"),
                    DAMAGED,
                ));
            }
        })
    }

    /// The entry of a tensor; its start is still counted from the data.
    pub(super) fn tensor(&mut self, alignment: u64) -> Result<(String, GgufTensor)> {
        let name = self.text()?;
        let dimensions = self.u32()?;
        if dimensions == 0 || dimensions > DIMENSIONS_MAX {
            return Err(self.fault(Some(&name), format!("{dimensions} dimensions"), DAMAGED));
        }
        let mut shape = Vec::new();
        let mut elements = Some(1_u64);
        let mut fastest = 1;
        for dimension in 0..dimensions {
            let n = self.u64()?;
            fastest = if dimension == 0 { n } else { fastest };
            elements = elements.and_then(|elements| elements.checked_mul(n));
            let n = usize::try_from(n)
                .map_err(|_| self.fault(Some(&name), "a dimension is too large", DAMAGED))?;
            shape.insert(0, n);
        }
        let number = self.u32()?;
        let Some(kind) = GgufType::from_number(number) else {
            let problem = format!("element type {number} is not implemented");
            return Err(self.fault(
                Some(&name),
                problem,
                "F32, F16, BF16, Q4_0, Q4_1 and Q8_0 are read",
            ));
        };
        let start = self.u64()?;
        let (block, block_bytes) = kind.block();
        if fastest % block != 0 {
            let problem = format!("rows of {fastest} are not whole blocks of {block}");
            return Err(self.fault(Some(&name), problem, DAMAGED));
        }
        let bytes = elements.and_then(|elements| (elements / block).checked_mul(block_bytes));
        let Some(bytes) = bytes else {
            return Err(self.fault(
                Some(&name),
                format!("the size of {shape:?} overflows 64 bits"),
                DAMAGED,
            ));
        };
        if start % alignment != 0 {
            let problem = format!("its offset {start} is not a multiple of {alignment}");
            return Err(self.fault(Some(&name), problem, DAMAGED));
        }
        Ok((name, GgufTensor { shape, kind, start, bytes }))
    }
}

/// Bytes that a value of a type takes at least.
fn smallest(kind: u32) -> u64 {
    match kind {
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => 12,
        _ => 1,
    }
}

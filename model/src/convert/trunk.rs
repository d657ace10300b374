//! The trunk file. Matrices pass through memory in pieces of whole blocks of rows, so that an embedding of gigabytes
//! needs no more room than a small one.

use shimmer_kernels::{BLOCK_ROWS, MatrixLayout, pack_matrix};

use super::{Job, Unit};
use crate::error::{Error, Result};
use crate::manifest::{FileEntry, TensorEntry};
use crate::plan::{Plan, Source};
use crate::safetensors::{DType, HeaderEntry, TensorWriter};
use crate::schema::TrunkTensor;

/// f32 values of a matrix in memory at once: 64 MiB.
const PIECE_VALUES: usize = 16 << 20;

/// Bytes of the data.
pub(super) fn bytes(plan: &Plan) -> Result<u64> {
    plan.trunk.iter().map(|(tensor, _)| tensor.stored_bytes()).sum()
}

pub(super) fn write(job: &Job<'_>, name: &str) -> Result<Unit> {
    let trunk = &job.plan.trunk;
    let header =
        trunk.iter().map(|(tensor, _)| header_entry(tensor)).collect::<Result<Vec<_>>>()?;
    let output = TensorWriter::create(&job.options.out.join(name), &header)?;
    let mut writer = Writer { job, output, hasher: blake3::Hasher::new() };
    let mut tensors = Vec::with_capacity(trunk.len());
    for (tensor, source) in trunk {
        tensors.push(writer.tensor(name, tensor, source)?);
    }
    Ok(Unit { entry: FileEntry::of(name, writer.output.finish()?), tensors, experts: Vec::new() })
}

/// Matrices are opaque bytes to other readers, vectors are what they are.
fn header_entry(tensor: &TrunkTensor) -> Result<HeaderEntry> {
    let name = tensor.name.clone();
    Ok(match tensor.shape.as_slice() {
        [length] => HeaderEntry { name, dtype: DType::F32, shape: vec![*length as u64] },
        _ => HeaderEntry { name, dtype: DType::U8, shape: vec![tensor.stored_bytes()?] },
    })
}

struct Writer<'a> {
    job: &'a Job<'a>,
    output: TensorWriter,
    /// Over the current tensor.
    hasher: blake3::Hasher,
}

impl Writer<'_> {
    fn tensor(&mut self, file: &str, tensor: &TrunkTensor, source: &Source) -> Result<TensorEntry> {
        let offset = self.output.at();
        self.hasher.reset();
        match tensor.layout()? {
            Some(layout) => self.matrix(tensor, &layout, source)?,
            None => {
                let values = self.job.plan.reader(source)?.all()?;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                self.write(&bytes)?;
            }
        }
        let bytes = tensor.stored_bytes()?;
        assert_eq!(self.output.at(), offset + bytes, "tensor {} has its length", tensor.name);
        Ok(TensorEntry {
            name: tensor.name.clone(),
            file: file.to_owned(),
            offset,
            bytes,
            shape: tensor.shape.clone(),
            format: tensor.format,
            blake3: self.hasher.finalize().to_hex().to_string(),
        })
    }

    /// Weights of all blocks, padding, scales of all blocks, padding. Blocks of rows are independent, so that pieces of
    /// whole blocks give the bytes of the whole.
    fn matrix(
        &mut self,
        tensor: &TrunkTensor,
        layout: &MatrixLayout,
        source: &Source,
    ) -> Result<()> {
        let fault = || Error::layout(format!("tensor {}", tensor.name));
        let reader = self.job.plan.reader(source)?;
        let cols = layout.cols();
        let step = (PIECE_VALUES / cols / BLOCK_ROWS).max(1) * BLOCK_ROWS;
        let mut scales = Vec::with_capacity(layout.scale_bytes());
        let mut first = 0;
        while first < layout.rows() {
            self.job.check_stop()?;
            let rows = step.min(layout.rows() - first);
            let piece = MatrixLayout::new(layout.format(), rows, cols).map_err(fault())?;
            let mut values = vec![0.0; rows * cols];
            reader.rows(first, &mut values)?;
            let mut weights = vec![0; piece.weight_bytes()];
            let before = scales.len();
            scales.resize(before + piece.scale_bytes(), 0);
            pack_matrix(&piece, &values, &mut weights, &mut scales[before..]).map_err(fault())?;
            self.write(&weights)?;
            first += rows;
        }
        if !scales.is_empty() {
            self.write(&vec![0; layout.scale_offset() - layout.weight_bytes()])?;
            self.write(&scales)?;
        }
        let stored =
            usize::try_from(tensor.stored_bytes()?).expect("a layout fits the address space");
        self.write(&vec![0; stored - layout.total_bytes()])
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.output.write(bytes)?;
        self.job.progress.advance(bytes.len() as u64);
        Ok(())
    }
}

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use eyrie_region::{Region, RegionError};

use crate::Dtype;

/// How a weight matrix lies in memory, always as published unless the name says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row-major little-endian float32.
    F32,
    /// Row-major little-endian float16.
    F16,
    /// Row-major little-endian bfloat16.
    Bf16,
    /// compressed-tensors pack-quantized: signed 4-bit plus 8, columns `2b` and `2b + 1` in the low and high
    /// nibble of byte `b` of a row; one bf16 scale per 32 columns.
    Int4G32,
    /// e4m3fn bytes with one scale per `rows` × `cols` block; the last block of a side may be ragged.
    Fp8Block {
        /// Output rows a scale covers.
        rows: usize,
        /// Input columns a scale covers.
        cols: usize,
    },
    /// e2m1 nibbles with one e4m3 scale per `group` columns and one float32 scale per tensor.
    Nvfp4 {
        /// Input columns a block scale covers.
        group: usize,
        /// The tensor scale as bits of a float32, to be multiplied.
        global_scale: u32,
    },
    /// The CPU kernels' tile form of bf16, 16 output rows per tile; only inside shared regions, never on disk.
    Bf16Tile16,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::F16 => f.write_str("f16"),
            Self::Bf16 => f.write_str("bf16"),
            Self::Int4G32 => f.write_str("int4 group 32"),
            Self::Fp8Block { rows, cols } => write!(f, "fp8 block {rows}x{cols}"),
            Self::Nvfp4 { group, .. } => write!(f, "nvfp4 group {group}"),
            Self::Bf16Tile16 => f.write_str("bf16 tiles of 16 rows"),
        }
    }
}

/// Where a quantised weight's scales lie.
#[derive(Debug, Clone)]
pub struct ScaleView {
    /// Memory that holds them; may be another shard than the weight's.
    pub region: Arc<dyn Region>,
    /// Bytes within the region.
    pub range: Range<usize>,
    /// Element type.
    pub dtype: Dtype,
    /// Rows and columns.
    pub shape: [usize; 2],
}

/// A weight matrix where it already lies: kernels borrow it, nothing is copied.
///
/// The byte range carries no alignment promise beyond one byte.
#[derive(Debug, Clone)]
pub struct WeightView {
    /// Memory that holds the elements.
    pub region: Arc<dyn Region>,
    /// How they are encoded.
    pub layout: Layout,
    /// Logical shape: output features, input features.
    pub shape: [usize; 2],
    /// Bytes within the region.
    pub data: Range<usize>,
    /// Scales of quantised layouts.
    pub scales: Option<ScaleView>,
}

impl WeightView {
    /// The encoded elements, for those who can use host memory only.
    ///
    /// # Errors
    /// [`RegionError::NotOnHost`], and [`RegionError::Bounds`] where the range lies outside the region.
    pub fn bytes(&self) -> Result<&[u8], RegionError> {
        part(self.region.as_ref(), &self.data)
    }

    /// The encoded scales; empty for layouts without scales.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes).
    pub fn scale_bytes(&self) -> Result<&[u8], RegionError> {
        self.scales.as_ref().map_or(Ok(&[]), |scales| part(scales.region.as_ref(), &scales.range))
    }

    /// Bytes of elements and scales, wherever they lie.
    pub fn byte_len(&self) -> usize {
        self.data.len() + self.scales.as_ref().map_or(0, |scales| scales.range.len())
    }
}

fn part<'a>(region: &'a dyn Region, range: &Range<usize>) -> Result<&'a [u8], RegionError> {
    let all = region.host_bytes()?;
    let (offset, bytes, limit) = (range.start as u64, range.len() as u64, all.len() as u64);
    all.get(range.clone()).ok_or(RegionError::Bounds { offset, bytes, limit })
}

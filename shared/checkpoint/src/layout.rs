use std::borrow::Cow;
use std::fmt;

use eyrie_region::RegionError;

use crate::{Bytes, Dtype};

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

/// A quantised weight's scales.
#[derive(Debug, Clone)]
pub struct ScaleView {
    /// Their bytes; they may be in another shard than the weight's.
    pub data: Bytes,
    /// Element type.
    pub dtype: Dtype,
    /// Rows and columns.
    pub shape: [usize; 2],
}

/// A weight matrix where it already lies: kernels borrow it, nothing is copied.
#[derive(Debug, Clone)]
pub struct WeightView {
    /// The elements.
    pub data: Bytes,
    /// How they are encoded.
    pub layout: Layout,
    /// Logical shape: output features, input features.
    pub shape: [usize; 2],
    /// Scales of quantised layouts.
    pub scales: Option<ScaleView>,
}

impl WeightView {
    /// The encoded elements, for those who can use host memory only.
    ///
    /// # Errors
    /// As [`Bytes::on_host`].
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>, RegionError> {
        self.data.on_host()
    }

    /// The encoded scales; empty for layouts without scales.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes).
    pub fn scale_bytes(&self) -> Result<Cow<'_, [u8]>, RegionError> {
        self.scales.as_ref().map_or(Ok(Cow::Borrowed(&[])), |scales| scales.data.on_host())
    }

    /// Bytes of elements and scales, wherever they lie.
    pub fn byte_len(&self) -> usize {
        self.data.len() + self.scales.as_ref().map_or(0, |scales| scales.data.len())
    }
}

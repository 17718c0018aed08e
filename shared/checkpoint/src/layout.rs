use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use eyrie_region::Region;

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
    /// The CPU kernels' tile form of bf16, 16 output rows per tile; only inside shared regions, never on disk.
    Bf16Tile16,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int4G32 => "int4 group 32",
            Self::Bf16Tile16 => "bf16 tiles of 16 rows",
        })
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
    /// The encoded elements; empty when the range lies outside the region.
    pub fn bytes(&self) -> &[u8] {
        self.region.bytes().get(self.data.clone()).unwrap_or_default()
    }

    /// The encoded scales; empty for layouts without scales.
    pub fn scale_bytes(&self) -> &[u8] {
        self.scales.as_ref().and_then(|s| s.region.bytes().get(s.range.clone())).unwrap_or_default()
    }
}

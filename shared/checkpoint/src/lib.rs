//! What a checkpoint folder says: config, tensor index, layouts and pair checks; no arithmetic.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "stand-in, replaced at merge")]

use std::ops::Range;
use std::sync::Arc;

use eyrie_region::Region;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    F32,
    F16,
    Bf16,
    Int4G32,
    Fp8Block { rows: usize, cols: usize },
    Nvfp4 { group: usize, global_scale: u32 },
    Bf16Tile16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    I32,
    I64,
    U8,
    Bool,
}

#[derive(Debug, Clone)]
pub struct ScaleView {
    pub region: Arc<dyn Region>,
    pub range: Range<usize>,
    pub dtype: Dtype,
    pub shape: [usize; 2],
}

#[derive(Debug, Clone)]
pub struct WeightView {
    pub region: Arc<dyn Region>,
    pub layout: Layout,
    pub shape: [usize; 2],
    pub data: Range<usize>,
    pub scales: Option<ScaleView>,
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Layout::Fp8Block { rows, cols } => write!(f, "fp8 block {rows}x{cols}"),
            other => write!(f, "{other:?}"),
        }
    }
}

impl WeightView {
    pub fn bytes(&self) -> &[u8] {
        &self.region.bytes()[self.data.clone()]
    }

    pub fn scale_bytes(&self) -> &[u8] {
        self.scales.as_ref().map_or(&[], |s| &s.region.bytes()[s.range.clone()])
    }
}

use std::fmt;
use std::path::Path;

use crate::json::{self, Fields};
use crate::{Layout, Result};

/// The weight format a checkpoint declares, before any tensor is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantFormat {
    /// No quantisation declared: every weight is float.
    None,
    /// compressed-tensors pack-quantized, symmetric int4 in groups of 32.
    Int4G32,
    /// e4m3 with one scale per block. Told apart to be refused by name: no kernel reads it.
    Fp8Block {
        /// Output rows a scale covers.
        rows: usize,
        /// Input columns a scale covers.
        cols: usize,
    },
    /// e2m1 with block and tensor scales. Told apart to be refused by name: no kernel reads it.
    Nvfp4 {
        /// Input columns a block scale covers.
        group: usize,
    },
}

impl fmt::Display for QuantFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::None => f.write_str("float"),
            Self::Int4G32 => Layout::Int4G32.fmt(f),
            Self::Fp8Block { rows, cols } => write!(f, "fp8 block {rows}x{cols}"),
            Self::Nvfp4 { group } => write!(f, "nvfp4 group {group}"),
        }
    }
}

impl QuantFormat {
    /// Reads the first `quantization_config` among the file's root and the text part.
    pub(super) fn read(root: &Fields<'_>, text: &Fields<'_>, text_prefix: &str) -> Result<Self> {
        let key = "quantization_config";
        if let Some(value) = root.get(key) {
            return Self::read_config(&Fields::of(root.path(), key, value)?);
        }
        let Some(value) = text.get(key) else { return Ok(Self::None) };
        let dotted = format!("{text_prefix}.{key}");
        Self::read_config(&Fields::of(text.path(), &dotted, value)?)
    }

    /// Reads the separate file that NVIDIA exports carry; float when there is none.
    pub(super) fn read_separate(dir: &Path) -> Result<Self> {
        let path = dir.join("hf_quant_config.json");
        let Some(value) = json::read_optional(&path)? else { return Ok(Self::None) };
        let root = Fields::of(&path, "", &value)?;
        match root.get("quantization") {
            Some(inner) => Self::read_algo(&Fields::of(&path, "quantization", inner)?),
            None => Err(root.missing("quantization")),
        }
    }

    fn read_config(q: &Fields<'_>) -> Result<Self> {
        match q.text("quant_method")? {
            Some("compressed-tensors") => Self::read_compressed(q),
            Some("fp8") => Self::read_fp8(q),
            Some("modelopt") => Self::read_algo(q),
            Some(_) => Err(q.refuse("quant_method", "only compressed-tensors, fp8 and modelopt are known")),
            None => Err(q.missing("quant_method")),
        }
    }

    fn read_algo(q: &Fields<'_>) -> Result<Self> {
        match q.text("quant_algo")? {
            Some("NVFP4") => Ok(Self::Nvfp4 { group: q.opt_size("group_size", 1 << 16)?.unwrap_or(16) }),
            Some(_) => Err(q.refuse("quant_algo", "only NVFP4 is known")),
            None => Err(q.missing("quant_algo")),
        }
    }

    fn read_fp8(q: &Fields<'_>) -> Result<Self> {
        let block = q.get("weight_block_size").ok_or_else(|| q.missing("weight_block_size"))?;
        let side = |i: usize| block.get(i)?.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
        match (side(0), side(1), block.as_array().map(Vec::len)) {
            (Some(rows), Some(cols), Some(2)) => Ok(Self::Fp8Block { rows, cols }),
            _ => Err(q.refuse("weight_block_size", "must be two integers above 0")),
        }
    }

    fn read_compressed(q: &Fields<'_>) -> Result<Self> {
        match q.text("format")? {
            Some("pack-quantized") => {}
            Some("nvfp4-pack-quantized") => return Ok(Self::Nvfp4 { group: 16 }),
            Some(_) => return Err(q.refuse("format", "only pack-quantized is supported")),
            None => return Err(q.missing("format")),
        }
        let groups_key = "config_groups";
        let groups = q.get(groups_key).ok_or_else(|| q.missing(groups_key))?;
        let Some(groups) = groups.as_object().filter(|g| !g.is_empty()) else {
            return Err(q.refuse(groups_key, "must be an object with at least one group"));
        };
        for (name, group) in groups {
            let dotted = format!("quantization_config.{groups_key}.{name}");
            let group = Fields::of(q.path(), &dotted, group)?;
            group.must_be_absent("input_activations", "quantised activations are not supported")?;
            let weights = group.get("weights").ok_or_else(|| group.missing("weights"))?;
            check_int4_g32(&Fields::of(q.path(), &format!("{dotted}.weights"), weights)?)?;
        }
        Ok(Self::Int4G32)
    }
}

fn check_int4_g32(w: &Fields<'_>) -> Result<()> {
    if w.size("num_bits", 64)? != 4 {
        return Err(w.refuse("num_bits", "only 4 is supported"));
    }
    if w.size("group_size", 1 << 20)? != 32 {
        return Err(w.refuse("group_size", "only 32 is supported"));
    }
    if w.text("type")?.is_some_and(|t| t != "int") {
        return Err(w.refuse("type", "only int is supported"));
    }
    if w.text("strategy")?.is_some_and(|s| s != "group") {
        return Err(w.refuse("strategy", "only group is supported"));
    }
    if !w.flag("symmetric", true)? {
        return Err(w.refuse("symmetric", "zero points are not supported"));
    }
    w.must_be_off("dynamic", "weights must be static")?;
    w.must_be_absent("actorder", "activation ordering is not supported")
}

use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

/// The largest header accepted; the same bound the reference safetensors reader has.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    #[serde(rename = "BF16")]
    Bf16,
    /// Signed 32 bits.
    I32,
    /// Signed 64 bits.
    I64,
    /// Unsigned byte.
    U8,
    /// One byte, 0 or 1.
    #[serde(rename = "BOOL")]
    Bool,
    /// e4m3fn byte.
    #[serde(rename = "F8_E4M3")]
    F8E4m3,
    /// Power-of-two scale byte.
    #[serde(rename = "F8_E8M0")]
    F8E8m0,
}

impl Dtype {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 | Self::Bool | Self::F8E4m3 | Self::F8E8m0 => 1,
        }
    }

    /// True for the types a plain weight or norm may have.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }
}

/// Spelled as in the file.
impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::U8 => "U8",
            Self::Bool => "BOOL",
            Self::F8E4m3 => "F8_E4M3",
            Self::F8E8m0 => "F8_E8M0",
        })
    }
}

/// One tensor as a header describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeaderEntry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Bytes within the file.
    pub(crate) range: Range<usize>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HeaderError {
    File(String),
    Tensor { tensor: String, problem: String },
}

fn tensor(name: &str, problem: String) -> HeaderError {
    HeaderError::Tensor { tensor: name.to_owned(), problem }
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// A map kept as pairs: a JSON object silently keeps the last of two equal keys, which would hide a duplicate from
/// the index.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor names to dtype, shape and data_offsets")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut pairs = Vec::with_capacity(map.size_hint().unwrap_or(64));
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                        continue;
                    }
                    let entry = map
                        .next_value::<RawEntry>()
                        .map_err(|e| A::Error::custom(format_args!("tensor {name}: {e}")))?;
                    pairs.push((name, entry));
                }
                Ok(RawHeader(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// Reads the header of a safetensors file and proves that its tensors tile the rest of the file exactly.
pub(crate) fn parse(file: &[u8]) -> Result<Vec<HeaderEntry>, HeaderError> {
    let found = file.len();
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(HeaderError::File(format!(
            "truncated: {found} bytes, a safetensors file has at least 8"
        )));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(HeaderError::File(format!(
            "header length {length} is over the limit of {MAX_HEADER_BYTES} bytes; not a safetensors file?"
        )));
    }
    let Some((header, data)) = usize::try_from(length).ok().and_then(|n| rest.split_at_checked(n)) else {
        let wanted = length + 8;
        return Err(HeaderError::File(format!(
            "truncated: the header needs {wanted} bytes, the file has {found}"
        )));
    };
    let RawHeader(raw) =
        serde_json::from_slice(header).map_err(|e| HeaderError::File(format!("header is not valid: {e}")))?;
    let start = found - data.len();
    let entries = raw.into_iter().map(|(name, e)| locate(name, e, start)).collect::<Result<Vec<_>, _>>()?;
    check_tiling(&entries, start, found)?;
    Ok(entries)
}

fn locate(name: String, raw: RawEntry, start: usize) -> Result<HeaderEntry, HeaderError> {
    let [begin, end] = raw.data_offsets;
    let bytes = raw.shape.iter().try_fold(raw.dtype.size(), |n, &d| n.checked_mul(d));
    let (Some(bytes), Some(span)) = (bytes, end.checked_sub(begin)) else {
        let shape = raw.shape;
        return Err(tensor(
            &name,
            format!("shape {shape:?} with data_offsets [{begin}, {end}] is impossible"),
        ));
    };
    if bytes != span {
        let RawEntry { dtype, shape, .. } = raw;
        return Err(tensor(
            &name,
            format!("{dtype} {shape:?} needs {bytes} bytes, data_offsets [{begin}, {end}] hold {span}"),
        ));
    }
    match (start.checked_add(begin), start.checked_add(end)) {
        (Some(from), Some(to)) => {
            Ok(HeaderEntry { name, dtype: raw.dtype, shape: raw.shape, range: from..to })
        }
        _ => Err(tensor(&name, format!("data_offsets [{begin}, {end}] overflow"))),
    }
}

fn check_tiling(entries: &[HeaderEntry], start: usize, found: usize) -> Result<(), HeaderError> {
    let mut order: Vec<&HeaderEntry> = entries.iter().collect();
    order.sort_unstable_by_key(|e| (e.range.start, e.range.end));
    let mut at = start;
    for e in order {
        if e.range.start != at {
            let kind =
                if e.range.start < at { "overlaps the tensor before it" } else { "leaves a gap before it" };
            let (from, want) = (e.range.start - start, at - start);
            return Err(tensor(&e.name, format!("{kind}: data begins at {from}, expected {want}")));
        }
        at = e.range.end;
    }
    match found.cmp(&at) {
        std::cmp::Ordering::Less => Err(HeaderError::File(format!(
            "truncated: the header describes {at} bytes, the file has {found}"
        ))),
        std::cmp::Ordering::Greater => Err(HeaderError::File(format!(
            "trailing bytes: the header describes {at} bytes, the file has {found}"
        ))),
        std::cmp::Ordering::Equal => Ok(()),
    }
}

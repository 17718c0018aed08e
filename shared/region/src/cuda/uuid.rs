//! The name of a GPU that is the same in every process.

use std::fmt;
use std::str::FromStr;

/// Identity of a GPU, spelled as `nvidia-smi` does: `GPU-` and 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12.
///
/// Ordinals differ between processes with different `CUDA_VISIBLE_DEVICES`; this does not.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpuUuid([u8; 16]);

/// Text that is no [`GpuUuid`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("GPU UUID must be GPU- and 32 hexadecimal digits in groups of 8-4-4-4-12, given {0:?}")]
pub struct InvalidUuid(pub String);

/// Hexadecimal digits in each group.
const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];

impl From<[u8; 16]> for GpuUuid {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        let mut bytes = self.0.iter();
        for digits in GROUPS {
            f.write_str("-")?;
            for byte in bytes.by_ref().take(digits / 2) {
                write!(f, "{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for GpuUuid {
    type Err = InvalidUuid;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map(Self).ok_or_else(|| InvalidUuid(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<[u8; 16]> {
    let groups: Vec<&str> = text.strip_prefix("GPU-")?.split('-').collect();
    let hexadecimal = |group: &&str| group.bytes().all(|digit| digit.is_ascii_hexdigit());
    if !groups.iter().map(|group| group.len()).eq(GROUPS) || !groups.iter().all(hexadecimal) {
        return None;
    }
    Some(u128::from_str_radix(&groups.concat(), 16).ok()?.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_back_what_it_prints_and_nothing_else() {
        let text = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50";
        let uuid: GpuUuid = text.parse().unwrap();
        assert_eq!(uuid.to_string(), text);
        assert_eq!(text.to_uppercase().parse(), Ok(uuid));
        assert_eq!(GpuUuid::from([0x0f; 16]).to_string(), "GPU-0f0f0f0f-0f0f-0f0f-0f0f-0f0f0f0f0f0f");
        for wrong in [
            "",
            "cpu",
            "GPU-",
            "MIG-5fd4f087-86f3-7a43-b711-4771313afc50",
            &text[..39],
            "GPU-+fd4f087-86f3-7a43-b711-4771313afc50",
        ] {
            assert_eq!(wrong.parse::<GpuUuid>(), Err(InvalidUuid(wrong.to_owned())));
        }
    }
}

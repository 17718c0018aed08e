use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use eyrie_region::{DeviceSpan, Region, RegionError};

use crate::Fill;

/// Where a tensor's bytes come from.
#[derive(Debug, Clone)]
pub enum Bytes {
    /// Memory that is mapped: a file, or what a process shares. They carry no alignment promise beyond one byte.
    Mapped {
        /// The memory.
        region: Arc<dyn Region>,
        /// Which of its bytes.
        range: Range<usize>,
    },
    /// A seed: they are made where they are wanted.
    Made(Fill),
}

impl Bytes {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Mapped { range, .. } => range.len(),
            Self::Made(fill) => fill.byte_len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes in host memory, copied only where they have to be made.
    ///
    /// # Errors
    /// [`RegionError::NotOnHost`], and [`RegionError::Bounds`] where the range lies outside the region.
    pub fn on_host(&self) -> Result<Cow<'_, [u8]>, RegionError> {
        match self {
            Self::Mapped { region, range } => part(region.as_ref(), range).map(Cow::Borrowed),
            Self::Made(fill) => {
                let mut bytes = vec![0; fill.byte_len()];
                fill.write(&mut bytes);
                Ok(Cow::Owned(bytes))
            }
        }
    }

    /// Writes them to host memory of their length.
    ///
    /// # Errors
    /// As [`on_host`](Self::on_host), and [`RegionError::Bounds`] for memory of another length.
    pub fn write(&self, out: &mut [u8]) -> Result<(), RegionError> {
        if out.len() != self.len() {
            let (bytes, limit) = (self.len() as u64, out.len() as u64);
            return Err(RegionError::Bounds { offset: 0, bytes, limit });
        }
        match self {
            Self::Mapped { region, range } => out.copy_from_slice(part(region.as_ref(), range)?),
            Self::Made(fill) => fill.write(out),
        }
        Ok(())
    }

    /// The device memory that the bytes lie in, all of it; `None` where they lie in none.
    pub fn device(&self) -> Option<DeviceSpan> {
        match self {
            Self::Mapped { region, .. } => region.device(),
            Self::Made(_) => None,
        }
    }
}

fn part<'a>(region: &'a dyn Region, range: &Range<usize>) -> Result<&'a [u8], RegionError> {
    let all = region.host_bytes()?;
    let (offset, bytes, limit) = (range.start as u64, range.len() as u64, all.len() as u64);
    all.get(range.clone()).ok_or(RegionError::Bounds { offset, bytes, limit })
}

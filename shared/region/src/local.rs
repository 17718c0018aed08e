//! Memory of one process, shaped like a shared region.

use crate::{ALIGN, Region, RegionKind};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; ALIGN]);

/// Bytes owned by this process, aligned to [`ALIGN`].
#[derive(Clone)]
pub struct Local {
    lines: Vec<Line>,
    len: usize,
}

impl Local {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        Self { lines: vec![Line([0; ALIGN]); len.div_ceil(ALIGN)], len }
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut local = Self::zeroed(bytes.len());
        local.bytes_mut().copy_from_slice(bytes);
        local
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`, with a shared borrow.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    /// The bytes, to be written before the region is shared.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `lines` holds at least `len` initialised bytes without padding between them (`Line` is as large as
        // its alignment), and the borrow of `self` is exclusive for the slice's life.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl Region for Local {
    fn host(&self) -> Option<&[u8]> {
        Some(self.bytes())
    }

    fn kind(&self) -> RegionKind {
        RegionKind::Local
    }
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Local").field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_aligned_and_as_long_as_asked() {
        for len in [0, 1, 63, 64, 65, 4097] {
            let source: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let local = Local::copy_of(&source);
            assert_eq!(local.bytes(), source);
            assert!(local.bytes().as_ptr().cast::<Line>().is_aligned());
        }
    }
}

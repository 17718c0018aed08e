//! Auxiliary hidden states on their way to the draft: the shared ring, and the rows kept for a draft that lost them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use eyrie_kernels::Backend;
use eyrie_model::{Aux, PageAllocator, SeqTable};
use eyrie_region::{Epoch, RegionKind, RingError, RingGeometry, RingPayload};
use eyrie_wire::v1::FeatureRef;

use super::kept::{Kept, KeptSizes};
use super::ring::{Ring, RingCopy};
use super::rows::{RowMemory, RowSlice, StepRows};
use super::sequence::Key;
use crate::TargetError;

/// Rows a ring slot holds. A round of up to seven drafts fits one slot, and a slot is the unit that is overwritten.
pub(crate) const SLOT_ROWS: u32 = 8;

/// Size of the ring, and how a GPU's memory is shared where it lies there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingSizes {
    pub(crate) slots: u32,
    /// Values a row.
    pub(crate) width: usize,
    pub(crate) sharing: RegionKind,
}

/// The feature ring and the rows kept behind it, both beside what computes the rows.
#[derive(Debug)]
pub(crate) struct Features {
    backend: Backend,
    ring: Ring,
    kept: Kept,
}

/// Rows that a step computed for one sequence.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) key: Key,
    /// Position of the first.
    pub(crate) first: u32,
    /// Where they are among the step's rows.
    pub(crate) rows: Vec<usize>,
    /// Whether they are to be published.
    pub(crate) wanted: bool,
}

impl Features {
    /// A ring of `ring.slots` slots. Rows of live sequences and of known pages are kept as `sizes` says.
    pub(crate) fn create(
        backend: &Backend,
        ring: RingSizes,
        sizes: KeptSizes,
        epoch: Epoch,
    ) -> Result<Self, TargetError> {
        let geometry = RingGeometry { slots: ring.slots, slot_rows: SLOT_ROWS, row_width: ring.width as u32 };
        let memory = RowMemory::beside(backend, ring.width)?;
        Ok(Self {
            backend: backend.clone(),
            ring: Ring::create(backend, geometry, ring.sharing, epoch)?,
            kept: Kept::new(memory, sizes)?,
        })
    }

    pub(crate) fn geometry(&self) -> RingGeometry {
        self.ring.geometry()
    }

    /// Where the ring's rows lie, if not in the ring itself.
    pub(crate) fn payload(&self) -> Option<RingPayload> {
        self.ring.payload()
    }

    /// The ring's descriptors, for importers.
    pub(crate) fn fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        self.ring.fds()
    }

    /// A reader of the ring in this process, for drafts that cannot map it.
    pub(crate) fn copy(&self) -> Result<Arc<RingCopy>, TargetError> {
        Ok(Arc::new(self.ring.copy()?))
    }

    /// Bytes of the rows kept for sequences, and of those kept for known pages alone.
    pub(crate) fn kept_bytes(&self) -> (u64, u64) {
        let unused = self.kept.unused_bytes();
        (self.kept.bytes() - unused, unused)
    }

    /// Rows of live sequences that were let go since boot because the memory for them was full.
    pub(crate) fn rows_let_go(&self) -> u64 {
        self.kept.rows_let_go()
    }

    /// Keeps the rows of `aux` that each of `taken` names; publishes those that are wanted, all at once. Returns where each
    /// was published.
    pub(crate) fn take<'a>(
        &mut self,
        aux: &Aux,
        taken: impl Iterator<Item = &'a Taken> + Clone,
    ) -> Result<Vec<Vec<FeatureRef>>, TargetError> {
        let indices: Vec<usize> = taken.clone().flat_map(|part| part.rows.iter().copied()).collect();
        if indices.is_empty() {
            return Ok(taken.map(|_| Vec::new()).collect());
        }
        let selected = StepRows::select(&self.backend, aux, &indices)?;
        let all = selected.as_slice(&self.backend)?;
        let (mut next, mut runs) = (0, Vec::new());
        for part in taken {
            let rows = all.slice(next..next + part.rows.len());
            next += part.rows.len();
            self.kept.append(part.key, part.first, rows)?;
            runs.push((part.first, if part.wanted { rows } else { rows.slice(0..0) }));
        }
        Ok(self.ring.publish(&runs)?)
    }

    /// Publishes rows `from..to` of `key` again, at most half a ring of them; also tells the first position kept.
    pub(crate) fn publish_again(
        &mut self,
        key: Key,
        from: u32,
        to: u32,
    ) -> Result<(Vec<FeatureRef>, u32), RingError> {
        let most = (self.ring.geometry().slots / 2).max(1) * SLOT_ROWS;
        let (first_held, start, parts) = self.kept.read(key, from, to, most)?;
        let mut position = start;
        let runs: Vec<(u32, RowSlice<'_>)> = parts
            .into_iter()
            .map(|part| {
                let first = position;
                position += part.rows() as u32;
                (first, part)
            })
            .collect();
        let refs = self.ring.publish(&runs)?.concat();
        Ok((refs, first_held.unwrap_or(to)))
    }

    /// Lets go of all rows of `key` that no other sequence or known page has too.
    pub(crate) fn forget(&mut self, key: Key) {
        self.kept.forget(key);
    }

    /// How far into `table` a sequence of `slots` slots that wants all rows may begin, as [`Kept::reach`] says.
    pub(crate) fn reach(&mut self, table: &SeqTable, slots: usize, pages: &PageAllocator) -> u32 {
        self.kept.reach(table, slots, pages)
    }

    /// Gives `key` the rows that are kept of the known pages it begins with, as [`Kept::adopt`] says.
    pub(crate) fn adopt(&mut self, key: Key, table: &SeqTable, all: bool, pages: &PageAllocator) {
        self.kept.adopt(key, table, all, pages);
    }

    /// Keeps the rows of `key` for its known pages, from page number `from` on, as [`Kept::share`] says.
    pub(crate) fn share(
        &mut self,
        key: Key,
        table: &SeqTable,
        from: usize,
        all: bool,
        pages: &PageAllocator,
    ) {
        self.kept.share(key, table, from, all, pages);
    }

    /// Lets go of the rows of pages that are not known any more.
    pub(crate) fn sweep(&mut self, pages: &PageAllocator) {
        self.kept.sweep(pages);
    }
}

#[cfg(test)]
mod tests {
    use eyrie_kernels::{Cpu, CpuOptions, Isa};

    use super::*;

    const WIDTH: usize = 3;

    fn key(seq: u64) -> Key {
        Key { boot: 1, seq }
    }

    fn rows(positions: std::ops::Range<u32>) -> Vec<f32> {
        positions.flat_map(|p| [p as f32, 0.5, -(p as f32)]).collect()
    }

    fn features(backend: &Backend) -> Features {
        let sizes = KeptSizes { page_rows: 16, pages: 2, sequences: 1, limit: u64::MAX };
        let ring = RingSizes { slots: 4, width: WIDTH, sharing: RegionKind::Memfd };
        Features::create(backend, ring, sizes, Epoch::random().unwrap()).unwrap()
    }

    fn taken(seq: u64, first: u32, rows: impl IntoIterator<Item = usize>, wanted: bool) -> Taken {
        Taken { key: key(seq), first, rows: rows.into_iter().collect(), wanted }
    }

    #[test]
    fn a_publication_fills_slots_with_consecutive_positions() {
        let backend = Backend::from(Cpu::new(CpuOptions { threads: 1, isa: Isa::best() }).unwrap());
        let mut features = features(&backend);
        let aux = Aux::from_rows(&backend, rows(5..23), WIDTH).unwrap();
        let refs = features.take(&aux, [taken(1, 5, 0..18, true)].iter()).unwrap().remove(0);
        let spans: Vec<(u32, u32)> = refs.iter().map(|r| (r.first, r.rows)).collect();
        assert_eq!(spans, [(5, 8), (13, 8), (21, 2)]);
        let (again, first_held) = features.publish_again(key(1), 0, 23).unwrap();
        assert_eq!(first_held, 5);
        let rows: u32 = again.iter().map(|r| r.rows).sum();
        assert_eq!(rows, 16, "half of four slots of eight rows");
    }

    /// A tree's path and what others computed beside it.
    #[test]
    fn rows_of_one_step_are_told_apart() {
        let backend = Backend::from(Cpu::new(CpuOptions { threads: 1, isa: Isa::best() }).unwrap());
        let mut features = features(&backend);
        let aux = Aux::from_rows(&backend, rows(100..109), WIDTH).unwrap();
        let parts = [taken(1, 7, [0, 2, 5], true), taken(2, 0, [6], false), taken(3, 3, [7, 8], true)];
        let refs = features.take(&aux, parts.iter()).unwrap();
        let spans = |refs: &[FeatureRef]| refs.iter().map(|r| (r.first, r.rows)).collect::<Vec<_>>();
        assert_eq!(
            refs.iter().map(|refs| spans(refs)).collect::<Vec<_>>(),
            [vec![(7, 3)], vec![], vec![(3, 2)]]
        );
        let kept = |seq, from, to| {
            let (_, _, parts) = features.kept.read(key(seq), from, to, 99).unwrap();
            parts.iter().flat_map(|part| part.values()).copied().collect::<Vec<_>>()
        };
        assert_eq!(kept(1, 7, 10), [rows(100..101), rows(102..103), rows(105..106)].concat());
        assert_eq!((kept(2, 0, 1), kept(3, 3, 5)), (rows(106..107), rows(107..109)));
    }
}

//! One prompt and rounds of every usual width before the first request: on a GPU the first launch of a kernel loads it, and
//! the first of a size takes memory.

use candle_core::Device;
use eyrie_model::{LogitRows, SeqRows, SeqTable};

use super::Engine;
use crate::TargetError;

/// Rows of a round that kernels tell apart.
const ROUND_ROWS: usize = 8;

impl Engine {
    /// Computes rows of token 0 in pages that are given back; nothing is published, and no sequence sees them.
    ///
    /// # Errors
    /// What would have failed at the first request.
    pub(super) fn warm_up(&mut self) -> Result<(), TargetError> {
        let room = (self.pages.free_pages() * self.pages.page_rows()).min(self.limits.context as usize);
        let prompt = self.prefill_chunk.min(room.saturating_sub(ROUND_ROWS)).max(1);
        let mut table = SeqTable::default();
        // Without sequences all pages are free and none is shared, so nothing is to be copied.
        if self.pages.reserve(&mut table, prompt + ROUND_ROWS).is_err() {
            return Ok(());
        }
        let done = self.warm_up_in(&table, prompt);
        self.pages.discard(table);
        done
    }

    fn warm_up_in(&mut self, table: &SeqTable, prompt: usize) -> Result<(), TargetError> {
        let tokens = vec![0; prompt.max(ROUND_ROWS)];
        let passes = [(0, prompt, LogitRows::Last)].into_iter();
        let rounds = (1..=ROUND_ROWS).map(|rows| (prompt as u32, rows, LogitRows::All));
        for (base_len, rows, logits) in passes.chain(rounds) {
            let rows = SeqRows { table, base_len, tokens: &tokens[..rows], parents: None, logits };
            let out = self.model.forward(&[rows], &mut self.cache)?;
            // Waits for the kernels, and has the way to the host gone once.
            out.logits.map(|logits| logits.to_device(&Device::Cpu)).transpose()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::gather_tests::engine;

    #[test]
    fn a_warmed_up_engine_has_all_its_pages() {
        let mut engine = engine();
        let (free, known) = (engine.pages.free_pages(), engine.pages.idle_pages());
        engine.warm_up().unwrap();
        assert_eq!((engine.pages.free_pages(), engine.pages.idle_pages()), (free, known));
        assert!(engine.sequences.is_empty());
    }
}

//! One prompt and steps of every usual width before the first round: on a GPU the first launch of a kernel loads it, and the
//! first of a size takes memory.

use eyrie_model::{Aux, DraftCache, DraftRows, DraftState, Eagle3Head, Keep, Result, SeqTable};

/// Rows of the prompt, and of the widest step.
const PROMPT_ROWS: usize = 32;
const STEP_ROWS: usize = 8;

/// Computes rows of token 0 over features of zero in a cache that no sequence uses yet.
pub(super) fn warm_up(head: &mut Eagle3Head, cache: &mut DraftCache) -> Result<()> {
    let room = cache.pages() * cache.page_rows();
    let prompt = PROMPT_ROWS.min(room.saturating_sub(STEP_ROWS)).max(1);
    let mut table = SeqTable::default();
    // A cache of a few slots is not worth it.
    if cache.allocator().reserve(&mut table, prompt + STEP_ROWS).is_err() {
        return Ok(());
    }
    let backend = head.backend().clone();
    let tokens = [0; PROMPT_ROWS];
    let width = head.aux_width();
    let aux = Aux::from_rows(&backend, vec![0.0; prompt * width], width)?;
    let feature = &head.fuse(&aux)?;
    let rows = DraftRows {
        table: &table,
        base_slot: 0,
        origin: 0,
        tokens: &tokens[..prompt],
        feature,
        parents: None,
    };
    head.extend(cache, &[rows])?;
    cache.keep(&mut table, Keep::Len(prompt as u32))?;
    let hidden = head.config().hidden_size;
    for rows in 1..=STEP_ROWS {
        let feature = &DraftState::from_rows(&backend, vec![0.0; rows * hidden], hidden)?;
        let (base_slot, tokens) = (table.len(), &tokens[..rows]);
        let rows = DraftRows { table: &table, base_slot, origin: 0, tokens, feature, parents: None };
        // Read, so that it has been computed.
        head.step(cache, &[rows])?.states.to_vec()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use eyrie_checkpoint::{DraftCheckpoint, TargetCheckpoint};
    use eyrie_kernels::{Cpu, CpuOptions, Isa};
    use eyrie_model::{Backing, CaptureSet, SharedWeights};
    use eyrie_region::Epoch;

    use super::*;

    #[test]
    fn a_head_computes_once_before_it_is_asked_to() {
        let demo = |name| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo").join(name);
        let target = TargetCheckpoint::open(&demo("mini")).unwrap();
        let shared = SharedWeights::build(&target, Backing::Local, Epoch::random().unwrap()).unwrap();
        let draft = DraftCheckpoint::open(&demo("mini-eagle3")).unwrap();
        let backend = Cpu::new(CpuOptions { threads: 1, isa: Isa::best() }).unwrap().into();
        let capture = CaptureSet::new(&[2, 4, 5], 8).unwrap();
        let mut head = Eagle3Head::load(&draft, &capture, &shared, &backend).unwrap();
        for pages in [1, 2, 8] {
            let mut cache = head.new_cache(pages * 4, 4).unwrap();
            warm_up(&mut head, &mut cache).unwrap();
        }
    }
}

use crate::{DraftConfig, Dtype, Result, TensorEntry, TensorIndex};

/// Reads `d2t` into target ids by draft id, ascending; `None` when draft ids are target ids.
///
/// Fails unless the map is injective, in range, and agrees with `t2d` where that is stored.
pub(super) fn read_map(
    index: &TensorIndex,
    config: &DraftConfig,
    d2t: Option<&TensorEntry>,
    t2d: Option<&TensorEntry>,
) -> Result<Option<Vec<u32>>> {
    let (vocab, draft_vocab) = (config.vocab_size, config.draft_vocab_size);
    let Some(entry) = d2t else {
        if draft_vocab == vocab {
            return Ok(None);
        }
        let wanted = format!("I64 or I32 [{draft_vocab}], because draft_vocab_size < vocab_size = {vocab}");
        return Err(index.missing("d2t", &wanted));
    };
    if entry.shape != [draft_vocab] {
        let found = &entry.shape;
        return Err(index.refuse(entry, format!("{found:?}, expected draft_vocab_size = [{draft_vocab}]")));
    }
    let offsets = index.read_integers(entry)?;
    if draft_vocab < vocab && offsets.iter().all(|&o| o == 0) {
        let problem = "all zero: a broken export, it would map to the first ids of the vocabulary";
        return Err(index.refuse(entry, problem));
    }
    let ids = target_ids(index, entry, &offsets, vocab)?;
    if let Some(mask) = t2d {
        check_membership(index, mask, &ids, vocab)?;
    }
    Ok((draft_vocab < vocab).then_some(ids))
}

fn target_ids(index: &TensorIndex, entry: &TensorEntry, offsets: &[i64], vocab: usize) -> Result<Vec<u32>> {
    let mut ids: Vec<u32> = Vec::with_capacity(offsets.len());
    for (i, &offset) in offsets.iter().enumerate() {
        let id = i64::try_from(i).ok().and_then(|i| i.checked_add(offset));
        let Some(id) = id.and_then(|id| u32::try_from(id).ok()).filter(|&id| (id as usize) < vocab) else {
            let problem = format!("d2t[{i}] = {offset} maps outside the vocabulary of {vocab}");
            return Err(index.refuse(entry, problem));
        };
        if ids.last().is_some_and(|&last| last >= id) {
            let problem = format!("d2t[{i}] = {offset} maps to {id}: target ids must be strictly increasing");
            return Err(index.refuse(entry, problem));
        }
        ids.push(id);
    }
    Ok(ids)
}

fn check_membership(index: &TensorIndex, mask: &TensorEntry, ids: &[u32], vocab: usize) -> Result<()> {
    if mask.dtype != Dtype::Bool || mask.shape != [vocab] {
        let TensorEntry { dtype, shape, .. } = mask;
        return Err(index.refuse(mask, format!("{dtype} {shape:?}, expected BOOL [{vocab}]")));
    }
    let members = index.data(mask);
    if let Some(id) = ids.iter().find(|&&id| members.get(id as usize) != Some(&1)) {
        return Err(index.refuse(mask, format!("t2d[{id}] is false, but d2t maps to {id}")));
    }
    let count = members.iter().filter(|&&m| m != 0).count();
    if count != ids.len() {
        return Err(index.refuse(mask, format!("{count} ids are true, draft_vocab_size = {}", ids.len())));
    }
    Ok(())
}

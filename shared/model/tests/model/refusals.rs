//! Bad rows are refused with a line that names what, the limit and the value, before anything is computed.

use crate::common::{Pool, backend, deepseek, demo};
use eyrie_model::{CaptureSet, DeepSeek, Keep, LogitRows, SeqRows, SeqTable, TargetModel};

fn mini() -> DeepSeek {
    deepseek(&demo("mini"), &backend(1))
}

fn refusal(tokens: &[u32], base_len: u32, parents: Option<&[u16]>) -> String {
    let mut model = mini();
    let mut pool = Pool::new(&model, 64);
    let mut table = SeqTable::default();
    pool.pages.reserve(&mut table, 16).unwrap();
    let rows = SeqRows { table: &table, base_len, tokens, parents, logits: LogitRows::All };
    model.forward(&[rows], &mut pool.cache).unwrap_err().to_string()
}

#[test]
fn rows_that_cannot_be_run_name_the_limit_and_the_value() {
    for (error, parts) in [
        (refusal(&[1, 4096], 0, None), ["vocabulary of 4096", "got 4096"]),
        (refusal(&[], 0, None), ["at least one token", "got 0"]),
        (refusal(&[1; 17], 0, None), ["17 slots needed", "16 reserved"]),
        (refusal(&[1, 2], 15, None), ["17 slots needed", "16 reserved"]),
        (refusal(&[], 0, Some(&[])), ["0 rows need 0 parents", "got 0"]),
        (refusal(&[1, 2, 3], 0, Some(&[0])), ["3 rows need 2 parents", "got 1"]),
        (refusal(&[1, 2, 3], 0, Some(&[0, 2])), ["parent of row 2 must be at most 1", "got 2"]),
    ] {
        for part in parts {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
        assert!(error.starts_with("rows of sequence 0: ") && !error.contains('\n'), "{error:?}");
    }
}

#[test]
fn capture_ids_must_be_streams_of_this_model_in_order() {
    let mut model = mini();
    for (ids, part) in [
        (&[][..], "empty"),
        (&[2, 2][..], "strictly increasing"),
        (&[4, 2][..], "strictly increasing"),
        (&[9][..], "allowed id is 8, got 9"),
    ] {
        let error = CaptureSet::new(ids, 8).unwrap_err().to_string();
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
    // A set made for a deeper model is checked again against this one.
    let deeper = CaptureSet::new(&[2, 30, 58], 61).unwrap();
    assert!(model.set_capture(&deeper).unwrap_err().to_string().contains("got 58"));
    assert!(model.capture().is_none());
}

#[test]
fn an_empty_batch_is_an_empty_result() {
    let mut model = mini();
    let mut pool = Pool::new(&model, 64);
    let out = model.forward(&[], &mut pool.cache).unwrap();
    assert!(out.logits.is_none() && out.aux.is_none() && out.rows.is_empty());
    assert!(model.new_cache(0, 16).is_err() && model.new_cache(64, 0).is_err());
}

#[test]
fn rollback_keeps_only_rows_that_exist() {
    let model = mini();
    let mut pool = Pool::new(&model, 64);
    let mut table = SeqTable::default();
    pool.pages.reserve(&mut table, 16).unwrap();
    for (keep, part) in [
        (Keep::Len(17), "length 17 is over the 16"),
        (Keep::Path { base_len: 10, nodes: &[0, 6] }, "node 6 is in slot 16"),
        (Keep::Path { base_len: 0, nodes: &[0, 2, 1] }, "not strictly increasing"),
    ] {
        let error = model.rollback(&mut pool.cache, &mut table, keep).unwrap_err().to_string();
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
    assert!(table.is_empty());
}

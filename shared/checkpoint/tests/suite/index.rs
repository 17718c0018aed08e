//! Safetensors folders: what is accepted byte for byte, and the line each defect gives.

use std::fs;
use std::path::Path;

use eyrie_checkpoint::{Dtype, TensorIndex};
use proptest::prelude::*;
use serde_json::json;

use crate::support::{assert_line, fixture, safetensors, tensor, with_header, zeros};

fn open_bytes(bytes: &[u8]) -> eyrie_checkpoint::Result<TensorIndex> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    TensorIndex::open(dir.path())
}

#[test]
fn every_dtype_is_read_back_where_it_lies() {
    let tensors = [
        tensor("f32", "F32", &[2], &[1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat()),
        tensor("f16", "F16", &[1], &0x3e00u16.to_le_bytes()),
        tensor("bf16", "BF16", &[1, 1], &0x3fc0u16.to_le_bytes()),
        tensor("i32", "I32", &[1], &(-7i32).to_le_bytes()),
        tensor("i64", "I64", &[1], &(-9i64).to_le_bytes()),
        tensor("u8", "U8", &[3], &[1, 2, 3]),
        tensor("bool", "BOOL", &[1], &[1]),
        tensor("e4m3", "F8_E4M3", &[1], &[0x7e]),
        tensor("e8m0", "F8_E8M0", &[], &[0x7f]),
        tensor("empty", "F32", &[0, 4], &[]),
    ];
    let index = open_bytes(&safetensors(&tensors)).unwrap();
    assert_eq!(index.entries().len(), tensors.len());
    for t in &tensors {
        let entry = index.get(&t.name).unwrap();
        assert_eq!(
            (entry.dtype.to_string(), &entry.shape, &index.data(entry)[..]),
            (t.dtype.clone(), &t.shape, &t.data[..])
        );
        assert_eq!(entry.bytes(), t.data.len() as u64);
    }
    let get = |name: &str| index.get(name).unwrap();
    assert_eq!(index.read_floats(get("f32")).unwrap(), [1.5, -2.0]);
    assert_eq!(index.read_floats(get("f16")).unwrap(), [1.5]);
    assert_eq!(index.read_floats(get("bf16")).unwrap(), [1.5]);
    assert_eq!(index.read_integers(get("i32")).unwrap(), [-7]);
    assert_eq!(index.read_integers(get("i64")).unwrap(), [-9]);
    assert_line(index.read_floats(get("u8")).unwrap_err(), &["tensor u8: U8, expected F32"]);
    assert_line(index.read_integers(get("f32")).unwrap_err(), &["tensor f32: F32, expected I32"]);
    assert_eq!(get("e4m3").dtype, Dtype::F8E4m3);
}

#[test]
fn defective_headers_are_refused() {
    let entry = |body: &str| format!(r#"{{"a":{body}}}"#);
    let rows: Vec<(Vec<u8>, &[&str])> = vec![
        (vec![], &["model.safetensors: truncated", "empty"]),
        (vec![0; 7], &["truncated: 7 bytes", "at least 8"]),
        (200_000_000u64.to_le_bytes().to_vec(), &["header length 200000000", "100000000"]),
        (100u64.to_le_bytes().to_vec(), &["truncated: the header needs 108 bytes, the file has 8"]),
        (with_header("{]", &[]), &["header is not valid"]),
        (
            with_header(&entry(r#"{"dtype":"F64","shape":[],"data_offsets":[0,8]}"#), &[0; 8]),
            &["tensor a", "F64"],
        ),
        (
            with_header(&entry(r#"{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}"#), &[0]),
            &["tensor a", "-1"],
        ),
        (
            with_header(&entry(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#), &[0; 4]),
            &["tensor a: F32 [2] needs 8 bytes, data_offsets [0, 4] hold 4"],
        ),
        (
            with_header(&entry(r#"{"dtype":"U8","shape":[1],"data_offsets":[0,2]}"#), &[0; 2]),
            &["tensor a: U8 [1] needs 1 bytes, data_offsets [0, 2] hold 2"],
        ),
        (
            with_header(&entry(r#"{"dtype":"U8","shape":[1],"data_offsets":[1,0]}"#), &[0]),
            &["tensor a", "[1, 0] is impossible"],
        ),
        (
            with_header(
                &entry(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}"#),
                &[],
            ),
            &["tensor a", "is impossible"],
        ),
        (
            with_header(&entry(r#"{"dtype":"U8","shape":[8],"data_offsets":[0,8]}"#), &[0; 5]),
            &["model.safetensors: truncated: the header describes", "the file has"],
        ),
        (
            with_header(&entry(r#"{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#), &[0; 5]),
            &["model.safetensors: trailing bytes", "the file has"],
        ),
        (
            with_header(&entry(r#"{"dtype":"U8","shape":[2],"data_offsets":[3,5]}"#), &[0; 5]),
            &["tensor a: leaves a gap before it: data begins at 3, expected 0"],
        ),
        (
            with_header(
                r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
                &[0; 6],
            ),
            &["tensor b: overlaps the tensor before it: data begins at 2, expected 4"],
        ),
        (
            with_header(
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
                &[0; 2],
            ),
            &["tensor a: appears twice"],
        ),
        (
            with_header(
                &entry(&format!(r#"{{"dtype":"U8","shape":[1],"data_offsets":[{0},{0}]}}"#, u64::MAX)),
                &[],
            ),
            &["tensor a"],
        ),
    ];
    for (bytes, parts) in rows {
        let error = open_bytes(&bytes).expect_err(parts[0]);
        assert_line(&error, &["model.safetensors: "]);
        assert_line(error, parts);
    }
}

/// Two shards and their index, to be spoiled.
fn sharded(spoil: impl Fn(&Path, &mut serde_json::Value)) -> eyrie_checkpoint::Result<TensorIndex> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("one.safetensors"), safetensors(&[zeros("a", "F32", &[2], 4)])).unwrap();
    fs::write(dir.path().join("two.safetensors"), safetensors(&[zeros("b", "F32", &[3], 4)])).unwrap();
    let mut index = json!({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}});
    spoil(dir.path(), &mut index);
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    TensorIndex::open(dir.path())
}

#[test]
fn shards_and_index_must_agree() {
    let index = sharded(|_, _| {}).unwrap();
    assert!(index.file(index.get("b").unwrap()).ends_with("two.safetensors"));
    type Spoil = fn(&Path, &mut serde_json::Value);
    let rows: [(Spoil, &[&str]); 9] = [
        (|dir, _| fs::remove_file(dir.join("two.safetensors")).unwrap(), &["two.safetensors: cannot read"]),
        (
            |dir, _| {
                let path = dir.join("two.safetensors");
                let bytes = fs::read(&path).unwrap();
                fs::write(path, &bytes[..bytes.len() - 5]).unwrap();
            },
            &["two.safetensors: truncated: the header describes"],
        ),
        (
            |_, i| i["weight_map"]["c"] = json!("one.safetensors"),
            &["tensor c", "one.safetensors, which does not hold it"],
        ),
        (
            |_, i| i["weight_map"]["a"] = json!("two.safetensors"),
            &["tensor a", "two.safetensors, which does not hold it"],
        ),
        (|_, i| i["weight_map"]["b"] = json!(7), &["index.json: ", "tensor b", "invalid type: integer `7`"]),
        (|_, i| i["weight_map"]["b"] = json!("../two.safetensors"), &["tensor b", "same folder"]),
        (|_, i| *i = json!({}), &["index.json: ", "missing field `weight_map`"]),
        (
            |dir, _| {
                let both = [zeros("b", "F32", &[3], 4), zeros("stray", "U8", &[1], 1)];
                fs::write(dir.join("two.safetensors"), safetensors(&both)).unwrap();
            },
            &["two.safetensors: tensor stray: is not in the weight_map"],
        ),
        (
            |dir, _| {
                let both = [zeros("b", "F32", &[3], 4), zeros("a", "F32", &[2], 4)];
                fs::write(dir.join("two.safetensors"), safetensors(&both)).unwrap();
            },
            &["two.safetensors: tensor a: is also in", "one.safetensors"],
        ),
    ];
    for (spoil, parts) in rows {
        assert_line(sharded(spoil).expect_err(parts[0]), parts);
    }
}

#[test]
fn a_tensor_mapped_to_the_wrong_shard_is_refused() {
    let error = sharded(|dir, index| {
        let both = [zeros("b", "F32", &[3], 4), zeros("c", "U8", &[1], 1)];
        fs::write(dir.join("two.safetensors"), safetensors(&both)).unwrap();
        index["weight_map"]["c"] = json!("one.safetensors");
    });
    assert_line(
        error.unwrap_err(),
        &["tensor c", "places it in one.safetensors, it is in", "two.safetensors"],
    );
}

#[test]
fn a_tensor_mapped_twice_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("one.safetensors"), safetensors(&[zeros("a", "F32", &[2], 4)])).unwrap();
    let twice = r#"{"weight_map": {"a": "one.safetensors", "a": "one.safetensors"}}"#;
    fs::write(dir.path().join("model.safetensors.index.json"), twice).unwrap();
    assert_line(TensorIndex::open(dir.path()).unwrap_err(), &["tensor a: appears twice in the weight_map"]);
}

#[test]
fn folders_without_safetensors_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert_line(TensorIndex::open(dir.path()).unwrap_err(), &["no weights", "model.safetensors.index.json"]);
    fs::write(dir.path().join("pytorch_model.bin"), [0]).unwrap();
    let error = TensorIndex::open(dir.path()).unwrap_err();
    assert_line(error, &["pytorch_model.bin: pickled weights are never loaded", "convert"]);
    let error = TensorIndex::open(&dir.path().join("absent")).unwrap_err();
    assert_line(error, &["absent: cannot read"]);
}

proptest! {
    #[test]
    fn no_bytes_make_the_reader_panic(
        at in any::<prop::sample::Index>(), value in any::<u8>(), cut in any::<prop::sample::Index>()
    ) {
        let mut bytes = fs::read(fixture("v3_eagle3/expected.safetensors")).unwrap();
        let header = 8 + usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
        let at = at.index(header);
        let changed = bytes[at] != value;
        bytes[at] = value;
        // A flipped byte may still spell a valid header; a shortened file never is one.
        if let (Ok(index), true) = (open_bytes(&bytes), changed) {
            for entry in index.entries() {
                prop_assert!(entry.range.end <= bytes.len());
            }
        }
        let cut = cut.index(bytes.len());
        prop_assert!(open_bytes(&bytes[..cut]).is_err());
    }
}

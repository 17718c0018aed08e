use std::sync::Arc;

use eyrie_checkpoint::{Bytes, Layout};
use eyrie_kernels::{Embedding, Isa, KernelError, Linear};
use proptest::prelude::*;

use crate::common::*;

const LAYOUTS: [Layout; 4] = [Layout::F32, Layout::F16, Layout::Bf16, Layout::Int4G32];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn matches_float64_on_any_shape(seed: u64, out in 1usize..100, width in 1usize..130, rows in 1usize..12, layout in 0usize..4) {
        let layout = LAYOUTS[layout];
        let width = if layout == Layout::Int4G32 { width.div_ceil(32) * 32 } else { width };
        let mut rng = Rng(seed);
        let (view, w) = weight(&mut rng, layout, [out, width]);
        let x = rng.values(rows * width, 2.0);
        let want = matmul(&wide(&x), &w, width);
        let mut first = None;
        for cpu in [best(), cpu(1, Isa::Scalar)] {
            let linear = Linear::pack(&cpu, &view).unwrap();
            let y = linear.forward(&tensor(&x, width)).unwrap();
            prop_assert_eq!(y.dims(), &[rows, out]);
            let y = flat(&y);
            assert_close(&y, &want, 4e-6, "linear");
            let y = bits(&y);
            prop_assert_eq!(first.get_or_insert(y.clone()), &y);
        }
    }
}

#[test]
fn precision_at_logit_size() {
    // Rows that add up to logits of about 25 over 1024 inputs.
    let mut rng = Rng(7);
    for layout in LAYOUTS {
        let (view, w) = weight(&mut rng, layout, [64, 1024]);
        let mut x: Vec<f32> = (0..1024).map(|i| if w[i] > 0.0 { 1.0 } else { -1.0 }).collect();
        let size = matmul(&wide(&x), &w[..1024], 1024)[0];
        x.iter_mut().for_each(|x| *x *= (25.0 / size) as f32);
        let y = flat(&Linear::pack(&best(), &view).unwrap().forward(&tensor(&x, 1024)).unwrap());
        assert!((f64::from(y[0]) - 25.0).abs() < 1e-3);
        assert_close(&y, &matmul(&wide(&x), &w, 1024), 3e-5, &format!("{layout:?}"));
    }
}

#[test]
fn a_row_does_not_see_its_neighbours_threads_or_instruction_set() {
    for layout in LAYOUTS {
        let mut rng = Rng(11);
        let (out, width) = (200, 128);
        let (view, _) = weight(&mut rng, layout, [out, width]);
        let x = rng.values(512 * width, 1.0);
        let alone = Linear::pack(&cpu(1, Isa::best()), &view).unwrap();
        let want: Vec<u32> = x
            .chunks(width)
            .flat_map(|row| bits(&flat(&alone.forward(&tensor(row, width)).unwrap())))
            .collect();
        for cpu in variants() {
            let linear = Linear::pack(&cpu, &view).unwrap();
            for rows in WIDTHS {
                let rows = if is_slow(&cpu) { rows.min(65) } else { rows };
                // The last rows, so that a row's place in the batch changes with the width.
                let x = &x[(512 - rows) * width..];
                let y = bits(&flat(&linear.forward(&tensor(x, width)).unwrap()));
                assert!(y == want[(512 - rows) * out..], "{layout:?} {rows} rows on {cpu:?}");
            }
        }
    }
}

#[test]
fn int4_golden_word() {
    // Bytes 10 32 54 76 are -8..-1; a one-hot row reads one weight.
    let mut bytes = vec![0x88; 16];
    bytes[..4].copy_from_slice(&[0x10, 0x32, 0x54, 0x76]);
    let (mut view, _) = weight(&mut Rng(1), Layout::Int4G32, [1, 32]);
    view.data = mapped(bytes);
    if let Some(scale) = &mut view.scales {
        scale.data = mapped(half::bf16::from_f32(0.5).to_le_bytes().to_vec());
    }
    let linear = Linear::pack(&best(), &view).unwrap();
    let one_hot: Vec<f32> = (0..32 * 32).map(|i| f32::from(u8::from(i / 32 == i % 32))).collect();
    let y = flat(&linear.forward(&tensor(&one_hot, 32)).unwrap());
    assert_eq!(y[..9], [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0]);
}

#[test]
fn shared_tiles_are_borrowed_and_equal_packed_ones() {
    let mut rng = Rng(3);
    let shape = [50, 33];
    let (view, _) = weight(&mut rng, Layout::Bf16, shape);
    let mut tiles = vec![0xff; Linear::tile_bytes(shape)];
    Linear::write_tiles(&view, &mut tiles).unwrap();
    assert_eq!(tiles.len(), 64 * 33 * 2);
    let region = Arc::new(Memory([vec![0; 3], tiles].concat()));
    let at = |range| Bytes::Mapped { region: region.clone(), range };
    let mut shared = view.clone();
    shared.layout = Layout::Bf16Tile16;
    shared.data = at(3..region.0.len());
    let cpu = best();
    let borrowed = Linear::borrow(&cpu, &shared).unwrap();
    assert_eq!(Arc::strong_count(&region), 3, "the region itself is held, not a copy");
    let x = tensor(&rng.values(5 * 33, 1.0), 33);
    let packed = Linear::pack(&cpu, &view).unwrap();
    assert_eq!(flat(&borrowed.forward(&x).unwrap()), flat(&packed.forward(&x).unwrap()));

    shared.data = at(3..region.0.len() - 1);
    assert!(matches!(Linear::borrow(&cpu, &shared), Err(KernelError::Shape { .. })));
    let mut short = vec![0; 5];
    assert!(matches!(Linear::write_tiles(&view, &mut short), Err(KernelError::Shape { .. })));
}

#[test]
fn wrong_shapes_and_layouts_are_errors_that_name_both() {
    let cpu = best();
    let (mut view, _) = weight(&mut Rng(5), Layout::Bf16, [8, 40]);
    let linear = Linear::pack(&cpu, &view).unwrap();
    let error = linear.forward(&tensor(&[0.0; 39], 39)).unwrap_err().to_string();
    assert_eq!(error, "linear: x is [1, 39], expected [rows, 40]");
    view.layout = Layout::F32;
    let error = Linear::pack(&cpu, &view).unwrap_err().to_string();
    assert_eq!(error, "linear: weight bytes is [640], expected 1280 bytes for [8, 40]");
    view.layout = Layout::Int4G32;
    let error = Linear::pack(&cpu, &view).unwrap_err().to_string();
    assert_eq!(error, "linear: INT4 input width is 40, limit a multiple of 32");
    view.layout = Layout::Bf16Tile16;
    assert!(Linear::pack(&cpu, &view).unwrap_err().to_string().contains("bf16 tiles of 16 rows"));
    assert!(Embedding::new(&best(), &view).unwrap_err().to_string().ends_with("(supported: F32, F16, BF16)"));
    let (mut int4, _) = weight(&mut Rng(5), Layout::Int4G32, [8, 64]);
    int4.scales = None;
    let error = Linear::pack(&cpu, &int4).unwrap_err().to_string();
    assert_eq!(error, "linear: INT4 weight_scale is absent, limit present");
    let transposed = tensor(&[0.0; 80], 2).t().unwrap();
    assert!(matches!(linear.forward(&transposed), Err(KernelError::Tensor(_))));
}

#[test]
fn embedding_reads_rows_and_checks_ids() {
    for layout in [Layout::F32, Layout::F16, Layout::Bf16] {
        let (view, values) = weight(&mut Rng(9), layout, [7, 12]);
        let embedding = Embedding::new(&best(), &view).unwrap();
        let rows = flat(&embedding.lookup(&[6, 0, 6]).unwrap());
        for (row, id) in rows.chunks(12).zip([6, 0, 6]) {
            assert_close(row, &values[id * 12..][..12], 0.0, "embedding");
        }
        let error = embedding.lookup(&[1, 7]).unwrap_err().to_string();
        assert_eq!(error, "embedding: token id is 7, limit below the vocabulary of 7");
    }
}

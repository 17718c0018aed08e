use eyrie_checkpoint::Layout;
use eyrie_kernels::Linear;

use crate::common::{Rng, best, flat, tensor, weight};
use crate::gpu::{MOST_ROWS, assert_alone, assert_near, gpus, host, sized};

const LAYOUTS: [Layout; 4] = [Layout::F32, Layout::F16, Layout::Bf16, Layout::Int4G32];

fn width_for(layout: Layout, width: usize) -> usize {
    if layout == Layout::Int4G32 { width.next_multiple_of(32) } else { width }
}

#[test]
fn matches_the_cpu_on_any_shape() {
    let cpu = best();
    for gpu in gpus() {
        for seed in 0..sized(160, 16) {
            let mut rng = Rng(seed);
            let layout = LAYOUTS[seed as usize % 4];
            let out = 1 + rng.below(300);
            // Odd widths take the kernels that read number by number.
            let width = width_for(layout, (1 + rng.below(2100)) * [1, 8][rng.below(2)]);
            let rows = 1 + rng.below(20);
            let (view, _) = weight(&mut rng, layout, [out, width]);
            let x = gpu.round(rng.values(rows * width, 2.0));
            let want = flat(&Linear::pack(&cpu, &view).unwrap().forward(&tensor(&x, width)).unwrap());
            let linear = Linear::pack(&gpu.backend, &view).unwrap();
            let x = gpu.put(&x, width);
            let what = format!("{layout:?} [{out}, {width}], {rows} rows");
            let y = linear.forward(&x).unwrap();
            assert_eq!(y.dims(), [rows, out]);
            gpu.assert_close(&y, &want, &what);
            // Float32 results are not rounded to the activations.
            assert_near(&host(&linear.forward_f32(&x).unwrap()), &want, 1e-5, &what);
        }
    }
}

#[test]
fn a_row_does_not_see_its_neighbours() {
    // Few and many outputs, so that 1 to 8 warps share one; widths of whole and cut steps, and an odd one.
    let shapes = [(Layout::Bf16, 2100, 512), (Layout::F32, 40, 2048), (Layout::F16, 200, 1032)];
    let more = [(Layout::Int4G32, 24, 4096), (Layout::Int4G32, 300, 96), (Layout::Bf16, 33, 771)];
    for gpu in gpus() {
        for (layout, out, width) in shapes.into_iter().chain(more) {
            let mut rng = Rng(11);
            let (view, _) = weight(&mut rng, layout, [out, width]);
            let linear = Linear::pack(&gpu.backend, &view).unwrap();
            let x = gpu.put(&rng.values(MOST_ROWS * width, 1.0), width);
            let what = format!("{layout:?} [{out}, {width}]");
            let run = |rows: std::ops::Range<usize>| {
                host(&linear.forward(&x.narrow(0, rows.start, rows.len()).unwrap()).unwrap())
            };
            assert_alone(run, &what);
        }
    }
}

#[test]
fn what_a_gpu_cannot_take_is_an_error() {
    let gpu = &gpus()[0];
    let linear = Linear::from_f32(&gpu.backend, &[1.0; 6], [2, 3]).unwrap();
    let error = linear.forward(&gpu.put(&[0.0; 8], 4)).unwrap_err().to_string();
    assert_eq!(error, "linear: x is [2, 4], expected [rows, 3]");
    let error = linear.forward(&tensor(&[0.0; 3], 3)).unwrap_err().to_string();
    assert_eq!(error, "linear: operands of different backends");
    let error = linear.forward(&gpus()[1].put(&[0.0; 3], 3)).unwrap_err().to_string();
    assert_eq!(error, "linear: operands of different backends");
    assert!(Linear::from_f32(&gpu.backend, &[1.0; 5], [2, 3]).is_err());
}

use candle_core::Tensor;
use eyrie_checkpoint::{Bytes, Dtype, Fill, Layout, Numbers, ScaleView, WeightView};
use eyrie_kernels::{Backend, Linear};

use crate::common::{Rng, best, bits, flat, tensor};
use crate::gpu::{gpus, host};

/// A weight that is made from random keys, with a spread as checkpoints have.
fn made(rng: &mut Rng, layout: Layout, [out, width]: [usize; 2]) -> WeightView {
    let (mean, step) = (rng.value(), rng.value().abs() / (1 << 24) as f32);
    let mut fill = |numbers, elements| Bytes::Made(Fill { key: rng.next(), numbers, elements });
    let bf16 = Numbers::Bf16 { mean, step };
    let (data, scales) = match layout {
        Layout::F32 => (fill(Numbers::F32 { mean, step }, out * width), None),
        Layout::Bf16 => (fill(bf16, out * width), None),
        _ => {
            let shape = [out, width / 32];
            let data = fill(bf16, shape[0] * shape[1]);
            (fill(Numbers::Nibbles, out * width / 8), Some(ScaleView { data, dtype: Dtype::Bf16, shape }))
        }
    };
    WeightView { data, layout, shape: [out, width], scales }
}

/// Every weight as a product with a one-hot row tells it.
fn weights(backend: &Backend, view: &WeightView, put: impl Fn(&[f32], usize) -> Tensor) -> Tensor {
    let width = view.shape[1];
    let one_hot: Vec<f32> = (0..width * width).map(|i| f32::from(u8::from(i / width == i % width))).collect();
    Linear::pack(backend, view).unwrap().forward_f32(&put(&one_hot, width)).unwrap()
}

#[test]
fn the_gpu_makes_the_same_bits_as_the_cpu() {
    let cpu = best();
    for gpu in gpus() {
        for seed in 0..48 {
            let mut rng = Rng(seed);
            let layout = [Layout::F32, Layout::Bf16, Layout::Int4G32][seed as usize % 3];
            let width = 32 * (1 + rng.below(6));
            let outputs = 1 + rng.below(700);
            let view = made(&mut rng, layout, [outputs, width]);
            let got = host(&weights(&gpu.backend, &view, |values, width| gpu.put(values, width)));
            let want = flat(&weights(&cpu, &view, tensor));
            assert!(bits(&got) == bits(&want), "{layout:?} {:?}", view.shape);
        }
    }
}

use candle_core::Tensor;
use eyrie_checkpoint::{Bytes, Dtype, Fill, Layout, Numbers, ScaleView, WeightView};
use eyrie_kernels::{Backend, Linear};
use eyrie_region::VmmBuilder;

use crate::common::{Rng, best, bits, flat, tensor};
use crate::gpu::{Gpu, gpus, host, sized};

/// More elements than a launch has threads: some threads make several.
const MANY: [usize; 2] = [160_000, 32];

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
            assert_same(gpu, &cpu, &made(&mut rng, layout, [outputs, width]));
        }
        for (seed, layout) in [Layout::F32, Layout::Bf16].into_iter().enumerate() {
            assert_same(gpu, &cpu, &made(&mut Rng(seed as u64), layout, sized(MANY, [16, 32])));
        }
    }
}

fn assert_same(gpu: &Gpu, cpu: &Backend, view: &WeightView) {
    let got = host(&weights(&gpu.backend, view, |values, width| gpu.put(values, width)));
    let want = flat(&weights(cpu, view, tensor));
    assert!(bits(&got) == bits(&want), "{:?} {:?}", view.layout, view.shape);
}

#[test]
fn elements_outside_the_memory_are_refused() {
    const BYTES: u64 = 1024;
    let gpu = &gpus()[0];
    let mut memory = VmmBuilder::new(&eyrie_region::Gpu::open(0).unwrap(), "fill", BYTES).unwrap();
    let numbers = Numbers::F32 { mean: 0.0, step: 1.0 };
    let mut fill = |elements, offset| {
        gpu.backend.fill(&Fill { key: 1, numbers, elements }, &mut memory.span_mut(), offset)
    };
    fill(64, BYTES - 256).unwrap();
    for (elements, offset) in [(65, BYTES - 256), (64, BYTES - 252), (64, BYTES), (1, u64::MAX - 3)] {
        let line = fill(elements, offset).unwrap_err().to_string();
        assert!(line.starts_with("fill: memory is ") && line.ends_with("within 1024 bytes"), "{line}");
    }
    let line = fill(1, 2).unwrap_err().to_string();
    assert!(line.ends_with("limit a multiple of 4"), "{line}");
}

use std::sync::Arc;

use candle_core::{Device, Tensor};
use eyrie_checkpoint::{Bytes, Dtype, Layout, ScaleView, WeightView};
use eyrie_kernels::{Backend, Cpu, CpuOptions, Isa};
use eyrie_region::{Region, RegionKind};
use half::{bf16, f16};

/// A small reproducible generator (SplitMix64).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Uniform in -1..1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.value() * scale).collect()
    }
}

#[derive(Debug)]
pub(crate) struct Memory(pub(crate) Vec<u8>);

impl Region for Memory {
    fn host(&self) -> Option<&[u8]> {
        Some(&self.0)
    }

    fn kind(&self) -> RegionKind {
        RegionKind::Local
    }
}

/// Bytes in memory.
pub(crate) fn mapped(bytes: Vec<u8>) -> Bytes {
    let range = 0..bytes.len();
    Bytes::Mapped { region: Arc::new(Memory(bytes)), range }
}

pub(crate) fn view(layout: Layout, shape: [usize; 2], bytes: Vec<u8>) -> WeightView {
    WeightView { data: mapped(bytes), layout, shape, scales: None }
}

/// A random weight of a layout, and its exact values.
pub(crate) fn weight(rng: &mut Rng, layout: Layout, [out, width]: [usize; 2]) -> (WeightView, Vec<f64>) {
    let count = out * width;
    let scale = 1.0 / (width as f32).sqrt();
    let values = rng.values(count, scale);
    let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect::<Vec<_>>();
    match layout {
        Layout::F32 => {
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            (view(layout, [out, width], bytes), wide(values))
        }
        Layout::Bf16 => {
            let bits: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
            let bytes = bits.iter().flat_map(|v| v.to_le_bytes()).collect();
            (view(layout, [out, width], bytes), bits.iter().map(|v| f64::from(v.to_f32())).collect())
        }
        Layout::F16 => {
            let bits: Vec<f16> = values.iter().map(|&v| f16::from_f32(v)).collect();
            let bytes = bits.iter().flat_map(|v| v.to_le_bytes()).collect();
            (view(layout, [out, width], bytes), bits.iter().map(|v| f64::from(v.to_f32())).collect())
        }
        Layout::Int4G32 => int4(rng, [out, width]),
        other => panic!("no generator for {other:?}"),
    }
}

fn int4(rng: &mut Rng, [out, width]: [usize; 2]) -> (WeightView, Vec<f64>) {
    let bytes: Vec<u8> = (0..out * width / 2).map(|_| rng.next() as u8).collect();
    let scales: Vec<bf16> =
        (0..out * width / 32).map(|_| bf16::from_f32(rng.value() * 0.2 / (width as f32).sqrt())).collect();
    let values = (0..out * width)
        .map(|i| {
            let nibble = bytes[i / 2] >> (4 * (i % 2)) & 15;
            (f64::from(nibble) - 8.0) * f64::from(scales[i / 32].to_f32())
        })
        .collect();
    let scale_bytes: Vec<u8> = scales.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut view = view(Layout::Int4G32, [out, width], bytes);
    view.scales = Some(ScaleView { data: mapped(scale_bytes), dtype: Dtype::Bf16, shape: [out, width / 32] });
    (view, values)
}

pub(crate) fn cpu(threads: usize, isa: Isa) -> Backend {
    Cpu::new(CpuOptions { threads, isa }).unwrap().into()
}

pub(crate) fn best() -> Backend {
    cpu(2, Isa::best())
}

/// The variants that must agree bit for bit.
pub(crate) fn variants() -> Vec<Backend> {
    vec![
        cpu(1, Isa::best()),
        cpu(2, Isa::best()),
        cpu(3, Isa::best()),
        cpu(1, Isa::Scalar),
        cpu(2, Isa::Scalar),
    ]
}

/// Whether a variant is so slow that fewer rows have to do.
pub(crate) fn is_slow(backend: &Backend) -> bool {
    matches!(backend, Backend::Cpu(cpu) if cpu.isa() == Isa::Scalar)
}

pub(crate) fn tensor(values: &[f32], width: usize) -> Tensor {
    Tensor::from_slice(values, (values.len() / width, width), &Device::Cpu).unwrap()
}

pub(crate) fn flat(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// `x` `[rows, width]` times `w` `[out, width]` transposed.
pub(crate) fn matmul(x: &[f64], w: &[f64], width: usize) -> Vec<f64> {
    x.chunks_exact(width)
        .flat_map(|x| w.chunks_exact(width).map(move |w| x.iter().zip(w).map(|(x, w)| x * w).sum()))
        .collect()
}

pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

pub(crate) fn assert_close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(got) - want).abs() <= tolerance, "{what}: value {i} is {got}, reference {want}");
    }
}

pub(crate) const WIDTHS: [usize; 10] = [1, 2, 3, 5, 7, 16, 63, 64, 65, 512];

use std::ops::Range;
use std::sync::OnceLock;

use candle_core::{DType, Tensor};
use eyrie_kernels::{Activations, Backend, Cuda, CudaOptions};
use half::bf16;

use crate::common::bits;

/// The rows of a forward pass that must agree bit for bit with each row alone.
pub(crate) const ROWS: [usize; 10] = [1, 2, 3, 7, 9, 63, 64, 65, 512, 4096];
pub(crate) const MOST_ROWS: usize = 4096;

/// `all`, or `few` where `EYRIE_KERNEL_TESTS=small` asks for shapes that a race checker gets through.
pub(crate) fn sized<T>(all: T, few: T) -> T {
    let small = std::env::var("EYRIE_KERNEL_TESTS").is_ok_and(|size| size == "small");
    if small { few } else { all }
}

/// One GPU with one kind of activations.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) backend: Backend,
    pub(crate) cuda: Cuda,
    numbers: Activations,
}

/// The GPU with float32 and with bfloat16 activations, its free memory full of NaN.
pub(crate) fn gpus() -> &'static [Gpu; 2] {
    static GPUS: OnceLock<[Gpu; 2]> = OnceLock::new();
    let gpus = GPUS.get_or_init(|| {
        [Activations::F32, Activations::Bf16].map(|numbers| {
            let cuda = Cuda::open(CudaOptions { ordinal: 0, activations: numbers }).unwrap();
            Gpu { backend: Backend::Cuda(cuda.clone()), cuda, numbers }
        })
    });
    gpus.iter().for_each(Gpu::poison);
    gpus
}

impl Gpu {
    /// Fills memory that the pool will hand out next.
    fn poison(&self) {
        let sizes: &[usize] = sized(&[1 << 24, 1 << 22, 1 << 20, 1 << 18][..], &[1 << 18, 1 << 16]);
        let kept: Vec<Tensor> = sizes.iter().map(|&n| self.put(&vec![f32::NAN; n], 1 << 10)).collect();
        drop(kept);
    }

    /// Relative error that is allowed.
    pub(crate) fn tolerance(&self) -> f64 {
        match self.numbers {
            Activations::F32 => 1e-5,
            Activations::Bf16 => 1e-2,
        }
    }

    /// Values that activations can hold.
    pub(crate) fn round(&self, values: Vec<f32>) -> Vec<f32> {
        match self.numbers {
            Activations::F32 => values,
            Activations::Bf16 => values.into_iter().map(|v| bf16::from_f32(v).to_f32()).collect(),
        }
    }

    pub(crate) fn put(&self, values: &[f32], width: usize) -> Tensor {
        self.backend.activations(values.to_vec(), width).unwrap()
    }

    /// Compares with the reference by the norm of the difference.
    pub(crate) fn assert_close(&self, got: &Tensor, want: &[f32], what: &str) {
        assert_near(&host(got), want, self.tolerance(), &format!("{what} in {:?}", self.numbers));
    }
}

/// Values on the host; no kernel runs for that.
pub(crate) fn host(x: &Tensor) -> Vec<f32> {
    let flat = x.flatten_all().unwrap();
    match flat.dtype() {
        DType::BF16 => flat.to_vec1::<bf16>().unwrap().into_iter().map(bf16::to_f32).collect(),
        _ => flat.to_vec1().unwrap(),
    }
}

pub(crate) fn assert_near(got: &[f32], want: &[f32], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(want).map(|(&g, &w)| f64::from(g) - f64::from(w)));
    let size = norm(&mut want.iter().map(|&w| f64::from(w)));
    assert!(error <= tolerance * size + 1e-30, "{what}: error {error:e} of {size:e}, limit {tolerance:e}");
}

/// Checks that the last rows of 4,096, for each number of them in [`ROWS`], give what each of them gives alone.
pub(crate) fn assert_alone(run: impl Fn(Range<usize>) -> Vec<f32>, what: &str) {
    let most = sized(MOST_ROWS, 17);
    let alone: Vec<Vec<u32>> = (MOST_ROWS - most..MOST_ROWS).map(|row| bits(&run(row..row + 1))).collect();
    for rows in ROWS.into_iter().filter(|&rows| rows <= most) {
        let got = bits(&run(MOST_ROWS - rows..MOST_ROWS));
        assert!(got == alone[most - rows..].concat(), "{what}: {rows} rows");
    }
}

//! Launches of kernels by name.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock};

use cudarc::driver::{CudaFunction, CudaModule, result, sys};

use super::{Cuda, failed};
use crate::error::{Result, limit};

/// Threads of a block, as `THREADS` in common.cuh.
pub(crate) const THREADS: usize = 256;
/// Shared memory of a block that needs no permission.
const PLAIN_SHARED: usize = 48 << 10;
/// Blocks along y and z.
const MAX_SIDE: usize = 65_535;

/// The kernels of the module, looked up once each.
#[derive(Debug)]
pub(crate) struct Functions {
    module: Arc<CudaModule>,
    known: RwLock<HashMap<String, (&'static str, CudaFunction)>>,
}

impl Functions {
    pub(crate) fn new(module: Arc<CudaModule>) -> Functions {
        Functions { module, known: RwLock::default() }
    }

    fn get(&self, name: &str) -> Result<(&'static str, CudaFunction)> {
        if let Some((name, function)) = self.known.read().unwrap_or_else(PoisonError::into_inner).get(name) {
            return Ok((name, function.clone()));
        }
        // A name lives as long as the process, so that errors can carry it; there are as many as kernels.
        let kept: &'static str = name.to_owned().leak();
        let function = self.module.load_function(name).map_err(failed(kept))?;
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(name.to_owned(), (kept, function.clone()));
        Ok((kept, function))
    }
}

/// The blocks of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: [usize; 3],
    pub(crate) threads: usize,
    /// Bytes of shared memory beside the kernel's own.
    pub(crate) shared: usize,
}

impl Grid {
    pub(crate) fn new(x: usize, y: usize, z: usize) -> Grid {
        Grid { blocks: [x, y, z], threads: THREADS, shared: 0 }
    }

    /// A thread an item.
    pub(crate) fn items(count: usize) -> Grid {
        Grid::new(count.div_ceil(THREADS), 1, 1)
    }

    fn check(&self, name: &'static str) -> Result<()> {
        let [x, y, z] = self.blocks;
        if x > i32::MAX as usize || y > MAX_SIDE || z > MAX_SIDE {
            return Err(limit(name, "blocks", format!("{x} x {y} x {z}"), "2^31 - 1 x 65535 x 65535"));
        }
        Ok(())
    }
}

/// The values of a kernel's parameters, in their order.
pub(crate) trait Arguments {
    fn with<R>(&self, call: impl FnOnce(&mut [*mut c_void]) -> R) -> R;
}

macro_rules! arguments {
    ($($name:ident),+) => {
        impl<$($name: Copy),+> Arguments for ($($name,)+) {
            fn with<R>(&self, call: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
                #[expect(non_snake_case, reason = "named as its type")]
                let ($($name,)+) = self;
                call(&mut [$((&raw const *$name).cast_mut().cast()),+])
            }
        }
    };
}

arguments!(A);
arguments!(A, B);
arguments!(A, B, C);
arguments!(A, B, C, D);
arguments!(A, B, C, D, E);
arguments!(A, B, C, D, E, F);

impl Cuda {
    /// Submits a kernel; without blocks there is nothing to do.
    ///
    /// # Safety
    /// `arguments` are what the kernel `name` takes, and what it reads and writes through them lies in live allocations of
    /// this backend that nothing else uses until the stream gets there.
    pub(crate) unsafe fn launch(&self, name: &str, grid: Grid, arguments: impl Arguments) -> Result<()> {
        let (name, function) = self.0.functions.get(name)?;
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        grid.check(name)?;
        self.bind(name)?;
        if grid.shared > PLAIN_SHARED {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, grid.shared as i32).map_err(failed(name))?;
        }
        let [x, y, z] = grid.blocks.map(|side| side as u32);
        arguments
            .with(|pointers| {
                // SAFETY: by the caller's promise; the pointers outlive the call, which copies what they point to.
                unsafe {
                    result::launch_kernel(
                        function.cu_function(),
                        (x, y, z),
                        (grid.threads as u32, 1, 1),
                        grid.shared as u32,
                        self.stream().cu_stream(),
                        pointers,
                    )
                }
            })
            .map_err(failed(name))
    }
}

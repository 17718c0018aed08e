//! SwiGLU blocks: one for all rows, or experts over the rows that chose them.

use candle_core::Tensor;
use eyrie_checkpoint::WeightView;

use crate::backend::Backend;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Result, limit, shape};
use crate::linear::{Linear, Weight};
use crate::router::{Chosen, Routing};
use crate::tensor::row_count;

pub(crate) const OP: &str = "moe";

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct Mlp(Block);

#[derive(Debug)]
enum Block {
    Cpu(Box<cpu::Mlp>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Mlp),
}

impl Mlp {
    /// A block of gate and up `[intermediate, hidden]` and down `[hidden, intermediate]`.
    ///
    /// # Errors
    /// Shapes that do not fit each other, or weights of different backends.
    pub fn new(gate: Linear, up: Linear, down: Linear) -> Result<Mlp> {
        let size = |l: &Linear| [l.out_features(), l.in_features()];
        check([size(&gate), size(&up), size(&down)])?;
        Ok(Mlp(match (gate.0, up.0, down.0) {
            (Weight::Cpu(gate), Weight::Cpu(up), Weight::Cpu(down)) => {
                Block::Cpu(Box::new(cpu::Mlp { gate, up, down }))
            }
            #[cfg(feature = "cuda")]
            (Weight::Cuda(gate), Weight::Cuda(up), Weight::Cuda(down)) => {
                Block::Cuda(cuda::Mlp::new(gate, up, down)?)
            }
            #[cfg(feature = "cuda")]
            _ => return Err(crate::KernelError::Mixed { op: OP }),
        }))
    }

    /// Packs the three weights.
    ///
    /// # Errors
    /// As [`Linear::pack`] and [`Mlp::new`].
    pub fn pack(backend: &Backend, views: &ExpertViews) -> Result<Mlp> {
        let pack = |view| Linear::pack(backend, view);
        Mlp::new(pack(&views.gate)?, pack(&views.up)?, pack(&views.down)?)
    }

    /// Width of rows in and out.
    pub fn hidden(&self) -> usize {
        match &self.0 {
            Block::Cpu(block) => block.hidden(),
            #[cfg(feature = "cuda")]
            Block::Cuda(block) => block.hidden(),
        }
    }

    /// `[rows, hidden]` to the same shape.
    ///
    /// # Errors
    /// `x` is not contiguous, has another shape or lies elsewhere.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = row_count(OP, "x", x, self.hidden())?;
        match &self.0 {
            Block::Cpu(block) => block.forward(x, rows),
            #[cfg(feature = "cuda")]
            Block::Cuda(block) => block.forward(x, rows),
        }
    }

    fn on_cpu(&self) -> Result<&cpu::Mlp> {
        match &self.0 {
            Block::Cpu(block) => Ok(block),
            #[cfg(feature = "cuda")]
            Block::Cuda(_) => Err(crate::KernelError::Mixed { op: OP }),
        }
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self) -> Result<&cuda::Mlp> {
        match &self.0 {
            Block::Cpu(_) => Err(crate::KernelError::Mixed { op: OP }),
            Block::Cuda(block) => Ok(block),
        }
    }
}

/// Checks `[out, in]` of gate, up and down.
fn check([gate, up, down]: [[usize; 2]; 3]) -> Result<()> {
    let [intermediate, hidden] = gate;
    if up != gate {
        return Err(shape(OP, "up_proj", &up, format!("gate_proj's {gate:?}")));
    }
    if down != [hidden, intermediate] {
        return Err(shape(OP, "down_proj", &down, format!("[{hidden}, {intermediate}]")));
    }
    Ok(())
}

/// The checkpoint's views of one expert.
#[derive(Debug, Clone)]
pub struct ExpertViews {
    /// `gate_proj` `[intermediate, hidden]`.
    pub gate: WeightView,
    /// `up_proj` `[intermediate, hidden]`.
    pub up: WeightView,
    /// `down_proj` `[hidden, intermediate]`.
    pub down: WeightView,
}

/// The routed experts of one layer.
#[derive(Debug)]
pub struct Experts {
    count: usize,
    hidden: usize,
    blocks: Blocks,
}

#[derive(Debug)]
enum Blocks {
    Cpu(cpu::Experts),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Experts),
}

impl Experts {
    /// Packs the experts in the order of their ids.
    ///
    /// # Errors
    /// No experts, weights that cannot be packed, or experts of different widths.
    pub fn pack(backend: &Backend, views: &[ExpertViews]) -> Result<Experts> {
        let Some(first) = views.first() else { return Err(limit(OP, "experts", 0, "at least 1")) };
        let want = first.gate.shape;
        for views in views {
            check([views.gate.shape, views.up.shape, views.down.shape])?;
            if views.gate.shape != want {
                return Err(shape(OP, "expert", &views.gate.shape, format!("{want:?} as expert 0")));
            }
        }
        let blocks = match backend {
            Backend::Cpu(cpu) => Blocks::Cpu(cpu::Experts::pack(cpu, views)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Blocks::Cuda(cuda::Experts::pack(cuda, views)?),
        };
        Ok(Experts { count: views.len(), hidden: want[1], blocks })
    }

    /// Number of experts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Width of rows in and out.
    pub fn hidden(&self) -> usize {
        self.hidden
    }
}

/// Sums each row's experts, in ascending id, times their weights, then adds the shared expert:
/// `[rows, hidden]` to the same shape.
///
/// # Errors
/// Shapes, routes or ids that do not fit each other.
pub fn moe(x: &Tensor, routing: &Routing, experts: &Experts, shared: Option<&Mlp>) -> Result<Tensor> {
    let hidden = experts.hidden();
    let rows = row_count(OP, "x", x, hidden)?;
    if let Some(shared) = shared
        && shared.hidden() != hidden
    {
        return Err(limit(OP, "shared expert's hidden", shared.hidden(), format!("the experts' {hidden}")));
    }
    match (&experts.blocks, &routing.0) {
        (Blocks::Cpu(blocks), Chosen::Host(routes)) => {
            routes.check(rows, experts.count)?;
            blocks.forward(x, rows, routes, shared.map(Mlp::on_cpu).transpose()?)
        }
        #[cfg(feature = "cuda")]
        (Blocks::Cuda(blocks), Chosen::Cuda(routes)) => {
            blocks.forward(x, rows, routes, shared.map(Mlp::on_cuda).transpose()?)
        }
        #[cfg(feature = "cuda")]
        _ => Err(crate::KernelError::Mixed { op: OP }),
    }
}

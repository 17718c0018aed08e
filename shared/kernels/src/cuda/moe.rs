//! SwiGLU blocks on the device, for all rows or for the rows that chose an expert.

use candle_core::Tensor;

use super::linear::linear;
use super::{Activations, Buffer, Cuda, Grid, Linear, Operand, Output, Routes, THREADS, Weight};
use crate::error::{Result, limit, shape};
use crate::moe::{ExpertViews, OP};

/// Rows of a tile and the most experts, as in moe.cu.
const TILE_ROWS: usize = 8;
const MAX_EXPERTS: usize = 1024;
/// Outputs of a block: warps times the outputs of one, as in moe.cu.
const GATE_UP_OUTPUTS: usize = 16;
const DOWN_OUTPUTS: usize = 32;
/// Bytes of what lies between the projections at a time; more rows go in several passes.
const SCRATCH: usize = 256 << 20;

/// Gate, up and down of one block, or of several one after the other.
#[derive(Debug)]
struct Blocks {
    gate: Weight,
    up: Weight,
    down: Weight,
}

/// One block for all rows.
#[derive(Debug)]
pub(crate) struct Mlp {
    cuda: Cuda,
    blocks: Box<Blocks>,
}

/// The routed experts of one layer.
#[derive(Debug)]
pub(crate) struct Experts {
    cuda: Cuda,
    count: usize,
    blocks: Box<Blocks>,
}

/// As `Tile` in moe.cu.
type Tile = [u32; 3];

/// As `MoeArgs` in moe.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct MoeArgs {
    x: u64,
    first: u64,
    first_scales: u64,
    second: u64,
    second_scales: u64,
    y: u64,
    tiles: u64,
    order: u64,
    rows: u32,
    per_token: u32,
    inputs: u32,
    outputs: u32,
    x_by_pair: u32,
}

/// The pairs of some rows, sorted by expert; without experts every row is a pair.
struct Pairs {
    rows: usize,
    per_token: usize,
    /// Tiles at most.
    count: usize,
    sorted: Option<(Buffer<Tile>, Buffer<u32>)>,
}

impl Blocks {
    /// One kernel reads gate and up, so they share a format.
    fn new(gate: Weight, up: Weight, down: Weight) -> Result<Box<Blocks>> {
        if gate.format != up.format {
            let want = format!("gate_proj's {}", gate.format.name());
            return Err(limit(OP, "format of up_proj", up.format.name(), want));
        }
        Ok(Box::new(Blocks { gate, up, down }))
    }

    fn hidden(&self) -> usize {
        self.gate.inputs
    }

    fn intermediate(&self) -> usize {
        self.gate.outputs
    }

    /// `silu(gate x) * up x` of every pair: `[pairs, intermediate]`.
    fn gate_up(&self, cuda: &Cuda, x: Operand, pairs: &Pairs) -> Result<Output> {
        let h = cuda.output(OP, x.numbers, pairs.pairs() * self.intermediate())?;
        let args = MoeArgs {
            first: self.gate.data(),
            first_scales: self.gate.scales(),
            second: self.up.data(),
            second_scales: self.up.scales(),
            x_by_pair: 0,
            ..pairs.args(x.pointer, h.pointer, &self.gate)
        };
        let vectors = self.gate.vectors(x.pointer, &[self.hidden()]) && self.up.data().is_multiple_of(16);
        let name = kernel("gate_up", x.numbers, &self.gate, vectors);
        let grid = Grid::new(pairs.count, self.intermediate().div_ceil(GATE_UP_OUTPUTS), 1);
        // SAFETY: x has `rows` rows, h a row a pair, gate and up the experts that the tiles name.
        unsafe { cuda.launch(&name, grid, (args,)) }?;
        Ok(h)
    }

    /// The down projection of every pair in float32: `[pairs, hidden]`.
    fn down(&self, cuda: &Cuda, h: Operand, pairs: &Pairs) -> Result<Buffer<f32>> {
        let y = cuda.alloc::<f32>(OP, pairs.pairs() * self.hidden())?;
        let args = MoeArgs {
            first: self.down.data(),
            first_scales: self.down.scales(),
            x_by_pair: 1,
            ..pairs.args(h.pointer, y.pointer(), &self.down)
        };
        let vectors = self.down.vectors(h.pointer, &[self.intermediate()]);
        let name = kernel("down", h.numbers, &self.down, vectors);
        let grid = Grid::new(pairs.count, self.hidden().div_ceil(DOWN_OUTPUTS), 1);
        // SAFETY: h and y have a row a pair, down the experts that the tiles name.
        unsafe { cuda.launch(&name, grid, (args,)) }?;
        Ok(y)
    }

    /// One block's float32 result for all rows.
    fn wide(&self, cuda: &Cuda, x: Operand, rows: usize) -> Result<Output> {
        let h = self.gate_up(cuda, x, &Pairs::all(rows))?;
        linear(cuda, OP, &self.down, h.operand(rows * self.intermediate()), Activations::F32)
    }
}

fn kernel(what: &str, numbers: Activations, weight: &Weight, vectors: bool) -> String {
    let scalar = if vectors { "" } else { "_scalar" };
    format!("moe_{what}_{}_{}{scalar}", numbers.name(), weight.format.name())
}

impl Pairs {
    /// Every row once.
    fn all(rows: usize) -> Pairs {
        Pairs { rows, per_token: 1, count: rows.div_ceil(TILE_ROWS), sorted: None }
    }

    /// Sorts the pairs of `rows` rows whose routes start at `ids`.
    fn sort(cuda: &Cuda, ids: u64, rows: usize, per_token: usize, experts: usize) -> Result<Pairs> {
        let pairs = rows * per_token;
        let count = (pairs + (TILE_ROWS - 1) * experts.min(pairs)) / TILE_ROWS;
        let starts = cuda.alloc::<u32>(OP, experts)?;
        let tiles = cuda.alloc::<Tile>(OP, count)?;
        let order = cuda.alloc::<u32>(OP, pairs)?;
        let one = Grid { blocks: [1, 1, 1], threads: MAX_EXPERTS, shared: 0 };
        let sizes = (pairs as u32, experts as u32);
        let plan = (ids, starts.pointer(), tiles.pointer(), sizes.0, sizes.1, count as u32);
        let sort = (ids, starts.pointer(), order.pointer(), sizes.0, sizes.1);
        // SAFETY: there are `pairs` ids and places, `experts` starts, and no more than `count` tiles.
        unsafe {
            cuda.launch("moe_plan", one, plan)?;
            cuda.launch("moe_sort", Grid::items(experts * 32), sort)?;
        }
        Ok(Pairs { rows, per_token, count, sorted: Some((tiles, order)) })
    }

    fn pairs(&self) -> usize {
        self.rows * self.per_token
    }

    fn args(&self, x: u64, y: u64, weight: &Weight) -> MoeArgs {
        let (tiles, order) = self.sorted.as_ref().map_or((0, 0), |(t, o)| (t.pointer(), o.pointer()));
        MoeArgs {
            x,
            first: 0,
            first_scales: 0,
            second: 0,
            second_scales: 0,
            y,
            tiles,
            order,
            rows: self.rows as u32,
            per_token: self.per_token as u32,
            inputs: weight.inputs as u32,
            outputs: weight.outputs as u32,
            x_by_pair: 0,
        }
    }
}

impl Mlp {
    /// The shapes have been checked.
    pub(crate) fn new(gate: Linear, up: Linear, down: Linear) -> Result<Mlp> {
        Ok(Mlp { cuda: gate.cuda, blocks: Blocks::new(gate.weight, up.weight, down.weight)? })
    }

    pub(crate) fn hidden(&self) -> usize {
        self.blocks.hidden()
    }

    /// The shape of `x` has been checked.
    pub(crate) fn forward(&self, x: &Tensor, rows: usize) -> Result<Tensor> {
        let x = self.cuda.operand_of(OP, x)?;
        let h = self.blocks.gate_up(&self.cuda, x, &Pairs::all(rows))?;
        let h = h.operand(rows * self.blocks.intermediate());
        let y = linear(&self.cuda, OP, &self.blocks.down, h, x.numbers)?;
        Ok(y.into_tensor(rows, self.hidden()))
    }
}

impl Experts {
    /// The shapes have been checked.
    pub(crate) fn pack(cuda: &Cuda, views: &[ExpertViews]) -> Result<Experts> {
        let count = views.len();
        if count > MAX_EXPERTS {
            return Err(limit(OP, "experts", count, format!("{MAX_EXPERTS} on a GPU")));
        }
        let gate = Weight::stack(cuda, OP, views.iter().map(|views| &views.gate))?;
        let up = Weight::stack(cuda, OP, views.iter().map(|views| &views.up))?;
        let down = Weight::stack(cuda, OP, views.iter().map(|views| &views.down))?;
        Ok(Experts { cuda: cuda.clone(), count, blocks: Blocks::new(gate, up, down)? })
    }

    /// Each row's experts in ascending id times their weights, then the shared expert.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        rows: usize,
        routes: &Routes,
        shared: Option<&Mlp>,
    ) -> Result<Tensor> {
        if routes.rows() != rows || routes.experts != self.count {
            let got = [routes.rows(), routes.experts];
            return Err(shape(OP, "routes", &got, format!("{rows} rows of {} experts", self.count)));
        }
        let x = self.cuda.operand_of(OP, x)?;
        let hidden = self.blocks.hidden();
        let y = self.cuda.output(OP, x.numbers, x.len)?;
        let between = |blocks: &Blocks| hidden * 4 + blocks.intermediate() * x.numbers.size();
        let row = routes.per_token * between(&self.blocks) + shared.map_or(0, |s| between(&s.blocks));
        let step = (SCRATCH / row).max(1);
        for first in (0..rows).step_by(step) {
            let part = step.min(rows - first) * hidden;
            self.pass(x.part(first * hidden, part), routes, first, shared, &y)?;
        }
        Ok(y.into_tensor(rows, hidden))
    }

    /// Rows from `first` on; `x` is their part of the input.
    fn pass(
        &self,
        x: Operand,
        routes: &Routes,
        first: usize,
        shared: Option<&Mlp>,
        y: &Output,
    ) -> Result<()> {
        let cuda = &self.cuda;
        let hidden = self.blocks.hidden();
        let rows = x.len / hidden;
        let (ids, weights) = routes.at_row(first);
        let pairs = Pairs::sort(cuda, ids, rows, routes.per_token, self.count)?;
        let h = self.blocks.gate_up(cuda, x, &pairs)?;
        let down = self.blocks.down(cuda, h.operand(pairs.pairs() * self.blocks.intermediate()), &pairs)?;
        let shared = shared.map(|shared| shared.blocks.wide(cuda, x, rows)).transpose()?;
        let arguments = (
            down.pointer(),
            weights,
            shared.as_ref().map_or(0, |shared| shared.pointer),
            y.pointer + (first * hidden * x.numbers.size()) as u64,
            routes.per_token as u32,
            hidden as u32,
        );
        let grid = Grid::new(rows, hidden.div_ceil(THREADS), 1);
        // SAFETY: `down` has a row a pair, the shared block and y one a row; the weights lie as the pairs.
        unsafe { cuda.launch(&format!("moe_combine_{}", x.numbers.name()), grid, arguments) }
    }
}

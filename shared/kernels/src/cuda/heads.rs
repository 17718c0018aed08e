//! MLA and grouped queries on the device: what happens before attention, attention, and what happens after.

use std::sync::Arc;

use candle_core::Tensor;
use eyrie_checkpoint::{Layout, WeightView};

use super::attention::Attend;
use super::{Activations, Buffer, Cuda, Grid, Output, PagedRows, Product, RmsNorm, Rows, Weight};
use crate::cpu::tiles::Dense;
use crate::error::{Result, limit};
use crate::gqa::{self, GqaSpec};
use crate::mla::{MlaDims, OP};
use crate::rope::{Rope, RopeStyle};

/// Rows and threads of a block of `mla_absorb`, as in heads.cu.
const ABSORB_ROWS: usize = 4;
const ABSORB_THREADS: usize = 128;

/// As `MlaArgs` in heads.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct MlaArgs {
    q: u64,
    kv: u64,
    norm: u64,
    angles: u64,
    rows: u64,
    cache: u64,
    queries: u64,
    kv_b: u64,
    first_row: u32,
    count: u32,
    heads: u32,
    kv_lora: u32,
    nope: u32,
    rope: u32,
    v: u32,
    eps: f32,
}

/// The weights between a layer's projections.
#[derive(Debug)]
pub(crate) struct MlaWeights {
    cuda: Cuda,
    dims: MlaDims,
    norm: RmsNorm,
    /// `[heads * (nope + v), kv_lora]` as published, INT4 as float32: absorbing reads columns, expanding rows.
    kv_b: Weight,
    rope: Arc<Rope>,
    scale: f32,
}

impl MlaWeights {
    /// The shapes have been checked.
    pub(crate) fn new(
        cuda: &Cuda,
        dims: MlaDims,
        norm: RmsNorm,
        kv_b: &WeightView,
        rope: Arc<Rope>,
    ) -> Result<MlaWeights> {
        let kv_b = match kv_b.layout {
            Layout::Int4G32 => {
                let dense = Dense::new(OP, kv_b)?;
                let [outputs, inputs] = kv_b.shape;
                let values: Vec<f32> =
                    (0..outputs * inputs).map(|i| dense.get(i / inputs, i % inputs)).collect();
                Weight::from_f32(cuda, OP, &values, kv_b.shape)?
            }
            _ => Weight::upload(cuda, OP, kv_b)?,
        };
        let scale = rope.softmax_scale(dims.nope + dims.rope) as f32;
        Ok(MlaWeights { cuda: cuda.clone(), dims, norm, kv_b, rope, scale })
    }

    pub(crate) fn dims(&self) -> &MlaDims {
        &self.dims
    }

    /// Everything has been checked against everything.
    pub(crate) fn attend(
        &self,
        q: &Tensor,
        kv: &Tensor,
        cache: &mut PagedRows,
        rows: &Rows,
    ) -> Result<Tensor> {
        let (cuda, dims) = (&self.cuda, &self.dims);
        let numbers = cuda.numbers();
        let (q, kv) = (cuda.activation(OP, q)?, cuda.activation(OP, kv)?);
        let width = dims.heads * dims.v;
        let y = cuda.output(OP, numbers, rows.count() * width)?;
        let args = MlaArgs {
            q: q.pointer,
            kv: kv.pointer,
            norm: self.norm.weight.pointer(),
            angles: self.rope.on_device(cuda, rows.last())?,
            rows: rows.rows(),
            cache: cache.pointer(),
            queries: 0,
            kv_b: self.kv_b.data(),
            first_row: 0,
            count: rows.count() as u32,
            heads: dims.heads as u32,
            kv_lora: dims.kv_lora as u32,
            nope: dims.nope as u32,
            rope: dims.rope as u32,
            v: dims.v as u32,
            eps: self.norm.eps,
        };
        let name = format!("mla_append_{}", numbers.name());
        // SAFETY: kv has a row a row, and each row's slot lies in the cache.
        unsafe { cuda.launch(&name, Grid::new(rows.count(), 1, 1), (args,)) }?;
        let heads = dims.attention(self.scale);
        let attend = Attend { cuda, heads, cache, rows };
        let step = attend.step();
        for first in (0..rows.count()).step_by(step) {
            self.pass(&attend, args, (first, step.min(rows.count() - first)), &y)?;
        }
        Ok(y.into_tensor(rows.count(), width))
    }

    /// Absorbs, attends and expands rows `first..first + count`.
    fn pass(
        &self,
        attend: &Attend<'_>,
        args: MlaArgs,
        (first, count): (usize, usize),
        y: &Output,
    ) -> Result<()> {
        let MlaDims { heads, kv_lora, nope, v, .. } = self.dims;
        let cuda = &self.cuda;
        let queries = cuda.alloc::<f32>(OP, count * heads * self.dims.cache_width())?;
        let args =
            MlaArgs { queries: queries.pointer(), first_row: first as u32, count: count as u32, ..args };
        let name = format!("mla_absorb_{}_{}", y.numbers.name(), self.kv_b.format.name());
        let grid = Grid {
            blocks: [heads, count.div_ceil(ABSORB_ROWS), kv_lora.div_ceil(ABSORB_THREADS)],
            threads: ABSORB_THREADS,
            shared: ABSORB_ROWS * nope * 4,
        };
        // SAFETY: q and the queries hold these rows, kv_b all heads.
        unsafe { cuda.launch(&name, grid, (args,)) }?;
        let latents = cuda.output(OP, Activations::F32, count * heads * kv_lora)?;
        attend.launch(queries.pointer(), (first, count), (latents.pointer, Activations::F32))?;
        let x = latents.operand(count * heads * kv_lora);
        let expand = Product { x, rows: count, group_rows: nope + v, first: nope, outputs: v, groups: heads };
        let at = (first * heads * v * y.numbers.size()) as u64;
        expand.launch(cuda, &self.kv_b, y.pointer + at, y.numbers)
    }
}

/// As `GqaArgs` in heads.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct GqaArgs {
    q: u64,
    k: u64,
    v: u64,
    angles: u64,
    rows: u64,
    cache: u64,
    queries: u64,
    heads: u32,
    kv_heads: u32,
    dim: u32,
}

/// Everything has been checked against everything.
pub(crate) fn gqa(
    cuda: &Cuda,
    spec: &GqaSpec,
    [q, k, v]: [&Tensor; 3],
    cache: &mut PagedRows,
    rows: &Rows,
) -> Result<Tensor> {
    let GqaSpec { heads, kv_heads, head_dim, ref rope } = *spec;
    let numbers = cuda.numbers();
    let q = cuda.activation(gqa::OP, q)?;
    let queries = cuda.alloc::<f32>(gqa::OP, q.len)?;
    let y = cuda.output(gqa::OP, numbers, q.len)?;
    let args = GqaArgs {
        q: q.pointer,
        k: cuda.activation(gqa::OP, k)?.pointer,
        v: cuda.activation(gqa::OP, v)?.pointer,
        angles: rope.on_device(cuda, rows.last())?,
        rows: rows.rows(),
        cache: cache.pointer(),
        queries: queries.pointer(),
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        dim: head_dim as u32,
    };
    let style = match rope.spec().style {
        RopeStyle::Interleaved => "interleaved",
        RopeStyle::HalfSplit => "halves",
    };
    let name = format!("gqa_append_{}_{style}", numbers.name());
    // SAFETY: q, k, v and the queries have a row a row, and each row's slot lies in the cache.
    unsafe { cuda.launch(&name, Grid::new(rows.count(), 1, 1), (args,)) }?;
    let attend = Attend { cuda, heads: spec.attention(), cache, rows };
    let step = attend.step();
    for first in (0..rows.count()).step_by(step) {
        let count = step.min(rows.count() - first);
        let at = first * heads * head_dim;
        let to = y.pointer + (at * y.numbers.size()) as u64;
        attend.launch(queries.pointer() + (at * 4) as u64, (first, count), (to, numbers))?;
    }
    Ok(y.into_tensor(rows.count(), heads * head_dim))
}

/// Angles of positions on one GPU: `[positions, dim]`, cosines, then sines.
#[derive(Debug)]
pub(crate) struct Angles {
    cuda: Cuda,
    positions: usize,
    table: Buffer<f32>,
}

impl Angles {
    /// Address of a table up to position `last`, which `kept` holds or gets from `gather`.
    pub(crate) fn reach(
        kept: &mut Option<Angles>,
        cuda: &Cuda,
        last: u32,
        gather: impl FnOnce(std::ops::Range<u32>) -> Vec<f32>,
    ) -> Result<u64> {
        let needed = last as usize + 1;
        if let Some(angles) = kept.as_ref().filter(|a| a.positions >= needed && a.cuda.is(cuda)) {
            return Ok(angles.table.pointer());
        }
        if needed > MAX_POSITIONS {
            return Err(limit("rope", "position", last, format!("below {MAX_POSITIONS} on a GPU")));
        }
        let positions = needed.next_power_of_two().max(FIRST_POSITIONS);
        let table = cuda.upload("rope", &gather(0..positions as u32))?;
        let address = table.pointer();
        *kept = Some(Angles { cuda: cuda.clone(), positions, table });
        Ok(address)
    }
}

/// Positions that a table has at first and at most.
const FIRST_POSITIONS: usize = 4096;
const MAX_POSITIONS: usize = 1 << 20;

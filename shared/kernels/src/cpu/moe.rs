//! SwiGLU blocks on the CPU.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use super::linear::row_indices;
use super::tiles::{BLOCK_ROWS, BLOCK_TILES, Format, Inputs, Prepared, TILE, ZERO_BLOCK, even_chunks};
use super::{Cpu, Linear, Shared, exp, int4};
use crate::error::Result;
use crate::moe::{ExpertViews, OP};
use crate::router::Routes;
use crate::tensor::{operand, rows_of, wrap};

/// `down(silu(gate(x)) * up(x))`; the shapes have been checked.
#[derive(Debug)]
pub(crate) struct Mlp {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

impl Mlp {
    pub(crate) fn pack(cpu: &Cpu, views: &ExpertViews) -> Result<Mlp> {
        let pack = |view| Linear::pack(cpu, view);
        Ok(Mlp { gate: pack(&views.gate)?, up: pack(&views.up)?, down: pack(&views.down)? })
    }

    pub(crate) fn hidden(&self) -> usize {
        self.gate.in_features()
    }

    /// Width between.
    fn intermediate(&self) -> usize {
        self.gate.out_features()
    }

    pub(crate) fn forward(&self, x: &Tensor, rows: usize) -> Result<Tensor> {
        let plan = Plan::new(rows, None, Some(self));
        Ok(x.apply_op1_no_bwd(&MoeOp { cpu: self.gate.cpu(), hidden: self.hidden(), plan })?)
    }

    fn reads_int4(&self) -> bool {
        [&self.gate, &self.up].iter().any(|l| l.tiles().format() == Format::Int4)
    }
}

/// The routed experts of one layer in the order of their ids, at least one.
#[derive(Debug)]
pub(crate) struct Experts {
    cpu: Cpu,
    experts: Vec<Mlp>,
}

impl Experts {
    pub(crate) fn pack(cpu: &Cpu, views: &[ExpertViews]) -> Result<Experts> {
        let experts: Vec<Mlp> = views.iter().map(|views| Mlp::pack(cpu, views)).collect::<Result<_>>()?;
        Ok(Experts { cpu: cpu.clone(), experts })
    }

    pub(crate) fn forward(
        &self,
        x: &Tensor,
        rows: usize,
        routes: &Routes,
        shared: Option<&Mlp>,
    ) -> Result<Tensor> {
        let plan = Plan::new(rows, Some((routes, self)), shared);
        Ok(x.apply_op1_no_bwd(&MoeOp { cpu: &self.cpu, hidden: self.experts[0].hidden(), plan })?)
    }
}

/// One block and the rows that go through it.
struct Job<'a> {
    mlp: &'a Mlp,
    /// Range of [`Plan::rows`].
    rows: Range<usize>,
    /// Where its hidden rows start in the scratch.
    hidden: usize,
    /// Where their INT4 corrections start.
    corrections: usize,
}

/// Blocks in the order in which a row adds them up: experts by id, the shared one last.
struct Plan<'a> {
    jobs: Vec<Job<'a>>,
    rows: Vec<u32>,
    weights: Vec<f32>,
    hidden: usize,
    corrections: usize,
}

impl<'a> Plan<'a> {
    fn new(rows: usize, routed: Option<(&Routes, &'a Experts)>, shared: Option<&'a Mlp>) -> Plan<'a> {
        let mut plan =
            Plan { jobs: Vec::new(), rows: Vec::new(), weights: Vec::new(), hidden: 0, corrections: 0 };
        if let Some((routes, experts)) = routed {
            let mut order: Vec<u32> = (0..routes.ids.len() as u32).collect();
            order.sort_by_key(|&pair| routes.ids[pair as usize]);
            for pairs in order.chunk_by(|a, b| routes.ids[*a as usize] == routes.ids[*b as usize]) {
                let mlp = &experts.experts[routes.ids[pairs[0] as usize] as usize];
                let row = |&pair: &u32| (pair / routes.per_token as u32, routes.weights[pair as usize]);
                plan.push(mlp, pairs.iter().map(row));
            }
        }
        if let Some(mlp) = shared {
            plan.push(mlp, (0..rows as u32).map(|row| (row, 1.0)));
        }
        plan
    }

    fn push(&mut self, mlp: &'a Mlp, rows: impl Iterator<Item = (u32, f32)>) {
        let start = self.rows.len();
        for (row, weight) in rows {
            self.rows.push(row);
            self.weights.push(weight);
        }
        let rows = start..self.rows.len();
        let values = rows.len() * mlp.intermediate();
        self.jobs.push(Job { mlp, rows, hidden: self.hidden, corrections: self.corrections });
        self.hidden += values;
        self.corrections += values / int4::GROUP;
    }
}

struct MoeOp<'a> {
    cpu: &'a Cpu,
    hidden: usize,
    plan: Plan<'a>,
}

impl MoeOp<'_> {
    fn run(&self, x: &[f32]) -> Result<Vec<f32>> {
        let plain = Inputs::plain(x, self.hidden);
        let int4 = self.plan.jobs.iter().any(|job| job.mlp.reads_int4());
        let prepared = int4.then(|| Prepared::new(x, self.hidden));
        let prepared = prepared.as_ref().map_or(plain, Prepared::inputs);
        let mut hidden = vec![0.0; self.plan.hidden];
        let mut corrections = vec![0.0; self.plan.corrections];
        self.gate_up([plain, prepared], Shared::new(&mut hidden), Shared::new(&mut corrections))?;
        let mut y = vec![0.0; x.len()];
        self.down(&hidden, &corrections, Shared::new(&mut y))?;
        Ok(y)
    }

    /// Fills the hidden rows of all jobs, in the form that each job's down projection reads.
    fn gate_up(&self, inputs: [Inputs<'_>; 2], hidden: Shared<'_>, corrections: Shared<'_>) -> Result<()> {
        let (mut units, mut ends, mut work) = (Vec::new(), Vec::new(), 0);
        for job in &self.plan.jobs {
            let tiles = job.mlp.gate.tiles();
            for tile in (0..tiles.count()).step_by(BLOCK_TILES) {
                work += 2 * job.rows.len() * tiles.columns(tile, BLOCK_TILES).len() * self.hidden;
                units.push((job, tile));
                ends.push(work);
            }
        }
        self.cpu.split_by(&ends, |range| {
            for (job, tile) in &units[range] {
                self.gate_up_unit(job, *tile, inputs, hidden, corrections);
            }
        })
    }

    fn gate_up_unit(
        &self,
        job: &Job<'_>,
        tile: usize,
        [plain, prepared]: [Inputs<'_>; 2],
        hidden: Shared<'_>,
        corrections: Shared<'_>,
    ) {
        let (isa, m) = (self.cpu.isa(), job.mlp);
        let (mut gate, mut up) = (ZERO_BLOCK, ZERO_BLOCK);
        let tiles = (m.gate.tiles().count() - tile).min(BLOCK_TILES);
        let columns = m.gate.tiles().columns(tile, tiles);
        let rows = &self.plan.rows[job.rows.clone()];
        let inputs = |l: &Linear| if l.tiles().format() == Format::Int4 { prepared } else { plain };
        for piece in even_chunks(rows.len(), BLOCK_ROWS) {
            let picked = &rows[piece.clone()];
            m.gate.tiles().block(isa, inputs(&m.gate), picked, tile, tiles, &mut gate);
            m.up.tiles().block(isa, inputs(&m.up), picked, tile, tiles, &mut up);
            for (row, (gate, up)) in piece.zip(gate.iter().zip(&up)) {
                let at = row * m.intermediate() + columns.start..row * m.intermediate() + columns.end;
                // SAFETY: a unit's rows and columns belong to one thread.
                let out = unsafe { hidden.slice(job.hidden + at.start..job.hidden + at.end) };
                exp::silu_mul(isa, &gate[..columns.len()], &up[..columns.len()], out);
                if m.down.tiles().format() == Format::Int4 {
                    // The width is a multiple of 32 and a unit starts at one of 64: groups stay whole.
                    let groups = at.start / int4::GROUP..at.end / int4::GROUP;
                    let groups = job.corrections + groups.start..job.corrections + groups.end;
                    // SAFETY: the groups are those of the columns above.
                    int4::prepare(out, unsafe { corrections.slice(groups) });
                }
            }
        }
    }

    /// Adds up each row's outputs in the order of the jobs; a thread owns whole columns.
    fn down(&self, hidden: &[f32], corrections: &[f32], y: Shared<'_>) -> Result<()> {
        let work = self.plan.hidden * self.hidden;
        self.cpu.split(self.hidden.div_ceil(TILE), work, |range| {
            for part in even_chunks(range.len(), BLOCK_TILES) {
                let tiles = range.start + part.start..range.start + part.end;
                for job in &self.plan.jobs {
                    self.down_job(job, hidden, corrections, tiles.clone(), y);
                }
            }
        })
    }

    fn down_job(
        &self,
        job: &Job<'_>,
        hidden: &[f32],
        corrections: &[f32],
        tiles: Range<usize>,
        y: Shared<'_>,
    ) {
        let down = job.mlp.down.tiles();
        let width = job.mlp.intermediate();
        let inputs = Inputs {
            width,
            stride: width,
            values: &hidden[job.hidden..],
            corrections: &corrections[job.corrections..],
        };
        let columns = down.columns(tiles.start, tiles.len());
        let mut block = ZERO_BLOCK;
        for piece in even_chunks(job.rows.len(), BLOCK_ROWS) {
            let (index, used) = row_indices(&piece);
            down.block(self.cpu.isa(), inputs, &index[..used], tiles.start, tiles.len(), &mut block);
            for (pair, values) in piece.zip(&block) {
                let pair = job.rows.start + pair;
                let at = self.plan.rows[pair] as usize * self.hidden;
                // SAFETY: each output column belongs to one thread.
                let out = unsafe { y.slice(at + columns.start..at + columns.end) };
                let weight = self.plan.weights[pair];
                out.iter_mut().zip(values).for_each(|(y, d)| *y += weight * d);
            }
        }
    }
}

impl CustomOp1 for MoeOp<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = operand(OP, x, layout)?;
        let y = self.run(x).map_err(wrap)?;
        Ok(rows_of(y, x.len() / self.hidden, self.hidden))
    }
}

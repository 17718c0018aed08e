//! SwiGLU blocks: one for all rows, or experts over the rows that chose them.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use eyrie_checkpoint::WeightView;

use crate::cpu::{Cpu, Shared, exp, int4};
use crate::error::{Result, limit, shape};
use crate::linear::{Linear, row_indices};
use crate::router::Routes;
use crate::tensor::{operand, row_count, rows_of, wrap};
use crate::tiles::{BLOCK_ROWS, BLOCK_TILES, Format, Inputs, Prepared, TILE, ZERO_BLOCK, even_chunks};

const OP: &str = "moe";

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// A block of gate and up `[intermediate, hidden]` and down `[hidden, intermediate]`.
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    pub fn new(gate: Linear, up: Linear, down: Linear) -> Result<Mlp> {
        let size = |l: &Linear| [l.out_features(), l.in_features()];
        let [intermediate, hidden] = size(&gate);
        if size(&up) != size(&gate) {
            return Err(shape(OP, "up_proj", &size(&up), format!("gate_proj's {:?}", size(&gate))));
        }
        if size(&down) != [hidden, intermediate] {
            return Err(shape(OP, "down_proj", &size(&down), format!("[{hidden}, {intermediate}]")));
        }
        Ok(Mlp { gate, up, down })
    }

    /// Packs the three weights.
    ///
    /// # Errors
    /// As [`Linear::pack`] and [`Mlp::new`].
    pub fn pack(cpu: &Cpu, views: &ExpertViews) -> Result<Mlp> {
        let pack = |view| Linear::pack(cpu, view);
        Mlp::new(pack(&views.gate)?, pack(&views.up)?, pack(&views.down)?)
    }

    /// Width of rows in and out.
    pub fn hidden(&self) -> usize {
        self.gate.in_features()
    }

    /// Width between.
    fn intermediate(&self) -> usize {
        self.gate.out_features()
    }

    /// `[rows, hidden]` to the same shape.
    ///
    /// # Errors
    /// `x` is not a contiguous f32 CPU tensor of that shape.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = row_count(OP, "x", x, self.hidden())?;
        let plan = Plan::new(rows, None, Some(self));
        Ok(x.apply_op1_no_bwd(&MoeOp { cpu: self.gate.cpu(), hidden: self.hidden(), plan })?)
    }

    fn reads_int4(&self) -> bool {
        [&self.gate, &self.up].iter().any(|l| l.tiles().format() == Format::Int4)
    }
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
    cpu: Cpu,
    experts: Vec<Mlp>,
}

impl Experts {
    /// Packs the experts in the order of their ids.
    ///
    /// # Errors
    /// No experts, weights that cannot be packed, or experts of different widths.
    pub fn pack(cpu: &Cpu, views: Vec<ExpertViews>) -> Result<Experts> {
        let experts: Vec<Mlp> = views.iter().map(|views| Mlp::pack(cpu, views)).collect::<Result<_>>()?;
        let Some(first) = experts.first() else { return Err(limit(OP, "experts", 0, "at least 1")) };
        let want = [first.intermediate(), first.hidden()];
        if let Some(other) = experts.iter().map(|e| [e.intermediate(), e.hidden()]).find(|s| *s != want) {
            return Err(shape(OP, "expert", &other, format!("{want:?} as expert 0")));
        }
        Ok(Experts { cpu: cpu.clone(), experts })
    }

    /// Number of experts.
    pub fn count(&self) -> usize {
        self.experts.len()
    }

    /// Width of rows in and out.
    pub fn hidden(&self) -> usize {
        self.experts[0].hidden()
    }
}

/// Sums each row's experts, in ascending id, times their weights, then adds the shared expert:
/// `[rows, hidden]` to the same shape.
///
/// # Errors
/// Shapes, routes or ids that do not fit each other.
pub fn moe(x: &Tensor, routes: &Routes, experts: &Experts, shared: Option<&Mlp>) -> Result<Tensor> {
    let hidden = experts.hidden();
    let rows = row_count(OP, "x", x, hidden)?;
    if let Some(shared) = shared
        && shared.hidden() != hidden
    {
        return Err(limit(OP, "shared expert's hidden", shared.hidden(), format!("the experts' {hidden}")));
    }
    let pairs = rows * routes.per_token;
    if routes.ids.len() != pairs || routes.weights.len() != pairs {
        let got = [routes.ids.len(), routes.weights.len()];
        return Err(shape(OP, "routes", &got, format!("{rows} rows x {} experts", routes.per_token)));
    }
    if let Some(id) = routes.ids.iter().find(|&&id| id as usize >= experts.count()) {
        return Err(limit(OP, "expert id", id, format!("below {} experts", experts.count())));
    }
    let plan = Plan::new(rows, Some((routes, experts)), shared);
    Ok(x.apply_op1_no_bwd(&MoeOp { cpu: &experts.cpu, hidden, plan })?)
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

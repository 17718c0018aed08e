//! Weights in tiles of 16 outputs, and products of a few rows with a few tiles.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use eyrie_checkpoint::{Bytes, Dtype, Layout, WeightView};
use eyrie_region::{Local, Region};
use half::{bf16, f16};

use super::Isa;
use super::float::{self, FloatTiles};
use super::int4::{self, GROUP, GROUP_BYTES, Int4Tiles};
use crate::error::{KernelError, Result, limit, shape};

/// Outputs of one tile.
pub(crate) const TILE: usize = 16;
/// Rows of one block.
pub(crate) const BLOCK_ROWS: usize = 4;
/// Tiles of one block.
pub(crate) const BLOCK_TILES: usize = 4;
/// Outputs of one block.
pub(crate) const BLOCK_COLS: usize = TILE * BLOCK_TILES;

/// Results of one block: `[rows, outputs]`.
pub(crate) type Block = [[f32; BLOCK_COLS]; BLOCK_ROWS];

pub(crate) const ZERO_BLOCK: Block = [[0.0; BLOCK_COLS]; BLOCK_ROWS];

/// How a tile holds its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    Bf16,
    Int4,
}

/// Rows a kernel reads: row i is `values[i * stride..][..width]`, as [`Prepared`] makes it for INT4.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) width: usize,
    pub(crate) stride: usize,
    pub(crate) values: &'a [f32],
    /// `[rows, width / 32]` for INT4, else empty.
    pub(crate) corrections: &'a [f32],
}

impl<'a> Inputs<'a> {
    pub(crate) fn plain(values: &'a [f32], width: usize) -> Inputs<'a> {
        Inputs { width, stride: width, values, corrections: &[] }
    }

    fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..self.width]
    }

    fn correction(&self, row: usize) -> &'a [f32] {
        let groups = self.width / GROUP;
        &self.corrections[row * groups..][..groups]
    }
}

/// A copy of rows in the form INT4 tiles read.
#[derive(Debug)]
pub(crate) struct Prepared {
    width: usize,
    values: Vec<f32>,
    corrections: Vec<f32>,
}

impl Prepared {
    /// `values` is `[rows, width]`, width a multiple of 32.
    pub(crate) fn new(values: &[f32], width: usize) -> Prepared {
        let mut values = values.to_vec();
        let groups = width / GROUP;
        let mut corrections = vec![0.0; values.len() / GROUP];
        for (row, corrections) in values.chunks_exact_mut(width).zip(corrections.chunks_exact_mut(groups)) {
            int4::prepare(row, corrections);
        }
        Prepared { width, values, corrections }
    }

    pub(crate) fn inputs(&self) -> Inputs<'_> {
        Inputs { width: self.width, stride: self.width, values: &self.values, corrections: &self.corrections }
    }
}

/// A weight `[outputs, inputs]` in tiles; outputs past the last are zero.
#[derive(Debug)]
pub(crate) struct Tiles {
    format: Format,
    outputs: usize,
    inputs: usize,
    region: Arc<dyn Region>,
    bytes: Range<usize>,
}

/// Row-major weights read one at a time, for packing.
pub(crate) struct Dense<'a> {
    layout: Layout,
    inputs: usize,
    bytes: Cow<'a, [u8]>,
    scales: Cow<'a, [u8]>,
}

fn u16_at(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
}

impl<'a> Dense<'a> {
    /// Checks as [`check`](Self::check).
    pub(crate) fn new(op: &'static str, view: &'a WeightView) -> Result<Dense<'a>> {
        Self::check(op, view)?;
        let scales =
            if view.layout == Layout::Int4G32 { view.scale_bytes()? } else { Cow::Borrowed(&[][..]) };
        Ok(Dense { layout: view.layout, inputs: view.shape[1], bytes: view.bytes()?, scales })
    }

    /// Checks layout and byte lengths of F32, F16, BF16 or INT4-g32 weights, wherever they are.
    pub(crate) fn check(op: &'static str, view: &WeightView) -> Result<()> {
        let [outputs, inputs] = view.shape;
        let count = outputs * inputs;
        let want = match view.layout {
            Layout::F32 => count * 4,
            Layout::F16 | Layout::Bf16 => count * 2,
            Layout::Int4G32 if !inputs.is_multiple_of(GROUP) => {
                return Err(limit(op, "INT4 input width", inputs, "a multiple of 32"));
            }
            Layout::Int4G32 => count / 2,
            layout => return Err(KernelError::Layout { op, layout, supported: "F32, F16, BF16, INT4 g32" }),
        };
        if count == 0 {
            return Err(shape(op, "weight", &view.shape, "no empty side"));
        }
        if view.data.len() != want {
            let want = format!("{want} bytes for {:?}", view.shape);
            return Err(shape(op, "weight bytes", &[view.data.len()], want));
        }
        if view.layout == Layout::Int4G32 {
            let Some(scale) = &view.scales else {
                return Err(limit(op, "INT4 weight_scale", "absent", "present"));
            };
            let want = [outputs, inputs / GROUP];
            let fits = scale.shape == want && scale.data.len() == 2 * want[0] * want[1];
            if !fits || scale.dtype != Dtype::Bf16 {
                return Err(shape(op, "weight_scale", &scale.shape, format!("{want:?} in BF16")));
            }
        }
        Ok(())
    }

    /// The format that holds these weights without rounding.
    pub(crate) fn float_format(&self) -> Format {
        if self.layout == Layout::Bf16 { Format::Bf16 } else { Format::F32 }
    }

    /// Weight (output, input) as f32, exact (INT4: nibble times scale, rounded once).
    pub(crate) fn get(&self, output: usize, input: usize) -> f32 {
        let index = output * self.inputs + input;
        match self.layout {
            Layout::F32 => {
                let b = &self.bytes[4 * index..4 * index + 4];
                f32::from_le_bytes([b[0], b[1], b[2], b[3]])
            }
            Layout::F16 => f16::from_bits(u16_at(&self.bytes, index)).to_f32(),
            Layout::Bf16 => bf16::from_bits(u16_at(&self.bytes, index)).to_f32(),
            _ => {
                let nibble = self.bytes[index / 2] >> (4 * (index % 2)) & 15;
                f32::from(i16::from(nibble) - 8) * bf16::from_bits(self.scale(output, input / GROUP)).to_f32()
            }
        }
    }

    fn scale(&self, output: usize, group: usize) -> u16 {
        u16_at(&self.scales, output * (self.inputs / GROUP) + group)
    }

    /// Word `word` of 8 nibbles of an output.
    fn word(&self, output: usize, word: usize) -> u32 {
        let b = &self.bytes[(output * self.inputs / 8 + word) * 4..][..4];
        u32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
}

fn tile_stride(format: Format, inputs: usize) -> usize {
    match format {
        Format::F32 => inputs * 64,
        Format::Bf16 => inputs * 32,
        Format::Int4 => inputs / GROUP * GROUP_BYTES,
    }
}

/// Bytes of BF16 tiles of a `[outputs, inputs]` weight.
pub(crate) fn bf16_tile_bytes([outputs, inputs]: [usize; 2]) -> usize {
    outputs.div_ceil(TILE) * tile_stride(Format::Bf16, inputs)
}

/// Fills BF16 tiles: in each k, word i holds output i low and output i + 8 high.
fn fill_bf16(outputs: usize, inputs: usize, bytes: &mut [u8], bits: impl Fn(usize, usize) -> u16) {
    let mut words = bytes.chunks_exact_mut(2);
    for tile in 0..outputs.div_ceil(TILE) {
        for input in 0..inputs {
            for half in 0..TILE {
                let output = tile * TILE + half / 2 + 8 * (half % 2);
                let value = if output < outputs { bits(output, input) } else { 0 };
                if let Some(word) = words.next() {
                    word.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
}

/// Writes the BF16 tiles of a BF16 weight into `bytes`.
pub(crate) fn write_bf16_tiles(op: &'static str, view: &WeightView, bytes: &mut [u8]) -> Result<()> {
    if view.layout != Layout::Bf16 {
        return Err(KernelError::Layout { op, layout: view.layout, supported: "BF16" });
    }
    let dense = Dense::new(op, view)?;
    let want = bf16_tile_bytes(view.shape);
    if bytes.len() != want {
        return Err(shape(op, "tile bytes", &[bytes.len()], format!("{want} bytes for {:?}", view.shape)));
    }
    let [outputs, inputs] = view.shape;
    fill_bf16(outputs, inputs, bytes, |o, i| u16_at(&dense.bytes, o * inputs + i));
    Ok(())
}

impl Tiles {
    /// Repacks a F32, F16, BF16 or INT4-g32 weight without changing a value.
    pub(crate) fn pack(op: &'static str, view: &WeightView) -> Result<Tiles> {
        let dense = Dense::new(op, view)?;
        let [outputs, inputs] = view.shape;
        if view.layout == Layout::Int4G32 {
            return Ok(Tiles::pack_int4(outputs, inputs, &dense));
        }
        Ok(Tiles::pack_float(dense.float_format(), outputs, inputs, |o, i| dense.get(o, i)))
    }

    /// Packs `value(output, input)`; for BF16 every value must be one.
    pub(crate) fn pack_float(
        format: Format,
        outputs: usize,
        inputs: usize,
        value: impl Fn(usize, usize) -> f32,
    ) -> Tiles {
        Tiles::filled(format, outputs, inputs, |bytes| match format {
            Format::Bf16 => fill_bf16(outputs, inputs, bytes, |o, i| (value(o, i).to_bits() >> 16) as u16),
            _ => {
                for (index, word) in bytes.chunks_exact_mut(4).enumerate() {
                    let output = index / (TILE * inputs) * TILE + index % TILE;
                    if output < outputs {
                        word.copy_from_slice(&value(output, index / TILE % inputs).to_le_bytes());
                    }
                }
            }
        })
    }

    fn pack_int4(outputs: usize, inputs: usize, dense: &Dense<'_>) -> Tiles {
        Tiles::filled(Format::Int4, outputs, inputs, |bytes| {
            let groups = inputs / GROUP;
            for (index, block) in bytes.chunks_exact_mut(GROUP_BYTES).enumerate() {
                let (tile, group) = (index / groups, index % groups);
                for lane in 0..TILE {
                    let output = tile * TILE + lane;
                    if output >= outputs {
                        continue;
                    }
                    let at = 4 * (lane % 8) + 2 * (lane / 8);
                    block[at..at + 2].copy_from_slice(&dense.scale(output, group).to_le_bytes());
                    for word in 0..4 {
                        // Flipping the top bit turns the last nibble's offset 8 into a sign.
                        let bits = dense.word(output, group * 4 + word) ^ 0x8000_0000;
                        block[32 + 64 * word + 4 * lane..][..4].copy_from_slice(&bits.to_le_bytes());
                    }
                }
            }
        })
    }

    fn filled(format: Format, outputs: usize, inputs: usize, fill: impl FnOnce(&mut [u8])) -> Tiles {
        let len = outputs.div_ceil(TILE) * tile_stride(format, inputs);
        let mut local = Local::zeroed(len);
        fill(local.bytes_mut());
        Tiles { format, outputs, inputs, region: Arc::new(local), bytes: 0..len }
    }

    /// Borrows BF16 tiles that lie in a region.
    pub(crate) fn borrow(op: &'static str, view: &WeightView) -> Result<Tiles> {
        if view.layout != Layout::Bf16Tile16 {
            return Err(KernelError::Layout { op, layout: view.layout, supported: "BF16 tiles of 16" });
        }
        let [outputs, inputs] = view.shape;
        if outputs * inputs == 0 {
            return Err(shape(op, "weight", &view.shape, "no empty side"));
        }
        let want = bf16_tile_bytes(view.shape);
        let got = view.bytes()?.len();
        if got != want {
            return Err(shape(op, "tile bytes", &[got], format!("{want} bytes for {:?}", view.shape)));
        }
        let Bytes::Mapped { region, range } = view.data.clone() else {
            return Err(limit(op, "weight to be used where it lies", "made from a seed", "in memory"));
        };
        Ok(Tiles { format: Format::Bf16, outputs, inputs, region, bytes: range })
    }

    pub(crate) fn format(&self) -> Format {
        self.format
    }

    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }

    /// Number of tiles.
    pub(crate) fn count(&self) -> usize {
        self.outputs.div_ceil(TILE)
    }

    /// Valid outputs of `tiles` tiles from `tile`.
    pub(crate) fn columns(&self, tile: usize, tiles: usize) -> Range<usize> {
        tile * TILE..((tile + tiles) * TILE).min(self.outputs)
    }

    /// Products of 1 to 4 rows with `tiles` <= 4 tiles from `tile`.
    pub(crate) fn block(
        &self,
        isa: Isa,
        inputs: Inputs<'_>,
        rows: &[u32],
        tile: usize,
        tiles: usize,
        out: &mut Block,
    ) {
        let [a, b, c, d] = out;
        let call = Call { tiles: self, isa, inputs, tile, count: tiles };
        match *rows {
            [r0] => call.rows([r0], [a]),
            [r0, r1] => call.rows([r0, r1], [a, b]),
            [r0, r1, r2] => call.rows([r0, r1, r2], [a, b, c]),
            [r0, r1, r2, r3] => call.rows([r0, r1, r2, r3], [a, b, c, d]),
            _ => assert!(rows.is_empty(), "a block has at most {BLOCK_ROWS} rows"),
        }
    }
}

struct Call<'a> {
    tiles: &'a Tiles,
    isa: Isa,
    inputs: Inputs<'a>,
    tile: usize,
    count: usize,
}

impl Call<'_> {
    /// Cuts the tiles so that sums and weights stay in registers.
    fn rows<const R: usize>(&self, rows: [u32; R], mut out: [&mut [f32; BLOCK_COLS]; R]) {
        let mut done = 0;
        while done < self.count {
            let left = self.count - done;
            let out = out.each_mut().map(|out| &mut out[done * TILE..]);
            let at = self.tile + done;
            done += match (R, left) {
                (1, 4) => self.run::<R, 4>(rows, at, out),
                (1, 3) => self.run::<R, 3>(rows, at, out),
                (1 | 2, 2..) => self.run::<R, 2>(rows, at, out),
                _ => self.run::<R, 1>(rows, at, out),
            };
        }
    }

    fn run<const R: usize, const T: usize>(
        &self,
        rows: [u32; R],
        tile: usize,
        out: [&mut [f32]; R],
    ) -> usize {
        let k = self.tiles.inputs;
        let Tiles { region, bytes, format, .. } = self.tiles;
        // Host memory, or the tiles could not have been made.
        let all = region.host().unwrap_or_default();
        let weights = &all[bytes.clone()][tile * tile_stride(*format, k)..];
        let values = rows.map(|row| self.inputs.row(row as usize));
        match format {
            Format::F32 => self.isa.run(FloatTiles::<float::F32, R, T>::new(k, weights, values, out)),
            Format::Bf16 => self.isa.run(FloatTiles::<float::Bf16, R, T>::new(k, weights, values, out)),
            Format::Int4 => {
                let corrections = rows.map(|row| self.inputs.correction(row as usize));
                self.isa.run(Int4Tiles::<R, T>::new(k, weights, values, corrections, out));
            }
        }
        T
    }
}

/// Cuts `count` into the fewest pieces of at most `limit`, as equal as they can be.
pub(crate) fn even_chunks(count: usize, limit: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = count.div_ceil(limit.max(1)).max(1);
    (0..pieces).map(move |p| count * p / pieces..count * (p + 1) / pieces)
}

//! Rotary positions with YaRN: frequencies and angles in float64, one float32 table shared by layers.

use std::f64::consts::PI;
use std::sync::{PoisonError, RwLock};

use eyrie_checkpoint::Yarn;

#[cfg(feature = "cuda")]
use crate::cuda::{Angles, Cuda};
use crate::error::{Result, limit};

const OP: &str = "rope";
/// Positions from here on are computed at each use instead of kept.
const TABLE_POSITIONS: usize = 1 << 20;
const FIRST_POSITIONS: usize = 512;

/// Which two numbers form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(x[2i], x[2i + 1])`, as DeepSeek's attention.
    Interleaved,
    /// `(x[i], x[i + dim / 2])`, as Llama's attention.
    HalfSplit,
}

/// What a [`Rope`] is made from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// Rotated numbers of a head, even.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Context extension, if any.
    pub yarn: Option<Yarn>,
    /// Pairing.
    pub style: RopeStyle,
}

/// Rotary position embedding.
#[derive(Debug)]
pub struct Rope {
    spec: RopeSpec,
    frequencies: Vec<f64>,
    factor: f64,
    /// `[positions, dim]`: cosines, then sines.
    table: RwLock<Vec<f32>>,
    #[cfg(feature = "cuda")]
    on_device: std::sync::Mutex<Option<Angles>>,
}

fn mscale(factor: f64, coefficient: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * coefficient * factor.ln() + 1.0 }
}

/// The first index that YaRN blends and the last.
fn blended(yarn: &Yarn, dim: usize, theta: f64) -> (f64, f64) {
    let d = dim as f64;
    let original = yarn.original_max_position_embeddings as f64;
    let index = |rotations: f64| d * (original / (2.0 * PI * rotations)).ln() / (2.0 * theta.ln());
    let low = index(yarn.beta_fast).floor().max(0.0);
    let high = index(yarn.beta_slow).ceil().min(d - 1.0);
    (low, high)
}

fn blend(yarn: &Yarn, dim: usize, theta: f64, frequencies: &mut [f64]) {
    let (low, mut high) = blended(yarn, dim, theta);
    if low == high {
        high += 0.001;
    }
    for (i, frequency) in frequencies.iter_mut().enumerate() {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        *frequency = *frequency / yarn.factor * ramp + *frequency * (1.0 - ramp);
    }
}

fn attention_factor(yarn: &Yarn) -> f64 {
    if yarn.mscale != 0.0 && yarn.mscale_all_dim != 0.0 {
        mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    } else {
        mscale(yarn.factor, 1.0)
    }
}

fn check(yarn: &Yarn) -> Result<()> {
    let fields = [
        ("yarn factor", yarn.factor),
        ("yarn original_max_position_embeddings", yarn.original_max_position_embeddings as f64),
        ("yarn beta_fast", yarn.beta_fast),
        ("yarn beta_slow", yarn.beta_slow),
    ];
    for (name, value) in fields {
        if !(value.is_finite() && value > 0.0) {
            return Err(limit(OP, name, value, "finite and above 0"));
        }
    }
    Ok(())
}

impl Rope {
    /// Computes the frequencies; the table grows as positions are used.
    ///
    /// # Errors
    /// An odd or zero dimension, or a base, factor, length or beta out of its range.
    pub fn new(spec: RopeSpec) -> Result<Rope> {
        if spec.dim == 0 || !spec.dim.is_multiple_of(2) {
            return Err(limit(OP, "dim", spec.dim, "even and at least 2"));
        }
        if !(spec.theta.is_finite() && spec.theta > 1.0) {
            return Err(limit(OP, "theta", spec.theta, "finite and above 1"));
        }
        let dim = spec.dim as f64;
        let mut frequencies: Vec<f64> =
            (0..spec.dim / 2).map(|i| spec.theta.powf(-2.0 * i as f64 / dim)).collect();
        let mut factor = 1.0;
        if let Some(yarn) = &spec.yarn {
            check(yarn)?;
            blend(yarn, spec.dim, spec.theta, &mut frequencies);
            factor = attention_factor(yarn);
        }
        Ok(Rope {
            spec,
            frequencies,
            factor,
            table: RwLock::default(),
            #[cfg(feature = "cuda")]
            on_device: std::sync::Mutex::default(),
        })
    }

    /// What it was made from.
    pub fn spec(&self) -> &RopeSpec {
        &self.spec
    }

    /// `qk_dim^-0.5`, times YaRN's `m(factor, mscale_all_dim)^2`: the scale of the whole logit.
    pub fn softmax_scale(&self, qk_dim: usize) -> f64 {
        let scale = (qk_dim as f64).powf(-0.5);
        match &self.spec.yarn {
            Some(yarn) if yarn.mscale_all_dim != 0.0 => {
                scale * mscale(yarn.factor, yarn.mscale_all_dim).powi(2)
            }
            _ => scale,
        }
    }

    /// Appends the `dim` table values of one position.
    fn angles(&self, position: usize, out: &mut Vec<f32>) {
        let start = out.len();
        out.resize(start + self.spec.dim, 0.0);
        let (cosines, sines) = out[start..].split_at_mut(self.spec.dim / 2);
        for ((frequency, cosine), sine) in self.frequencies.iter().zip(cosines).zip(sines) {
            let (s, c) = (position as f64 * frequency).sin_cos();
            *cosine = (c * self.factor) as f32;
            *sine = (s * self.factor) as f32;
        }
    }

    /// `[positions, dim]`: the cosines and sines of each given position.
    pub(crate) fn gather(&self, positions: impl Iterator<Item = u32> + Clone) -> Vec<f32> {
        let dim = self.spec.dim;
        let kept = positions.clone().map(|p| p as usize).filter(|&p| p < TABLE_POSITIONS).max();
        let wanted = kept.map_or(0, |p| p + 1);
        let mut table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        if table.len() < wanted * dim {
            drop(table);
            self.grow(wanted.next_power_of_two().max(FIRST_POSITIONS));
            table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        }
        let mut out = Vec::new();
        for position in positions.map(|p| p as usize) {
            match table.get(position * dim..(position + 1) * dim) {
                Some(row) => out.extend_from_slice(row),
                None => self.angles(position, &mut out),
            }
        }
        out
    }

    /// Address on the GPU of `[positions, dim]` up to position `last`, as [`Rope::gather`] gives them.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&self, cuda: &Cuda, last: u32) -> Result<u64> {
        let mut kept = self.on_device.lock().unwrap_or_else(PoisonError::into_inner);
        Angles::reach(&mut kept, cuda, last, |positions| self.gather(positions))
    }

    fn grow(&self, positions: usize) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        for position in table.len() / self.spec.dim..positions {
            self.angles(position, &mut table);
        }
    }

    /// Rotates one head in place; `angles` is its position's row of [`Rope::gather`].
    pub(crate) fn rotate(&self, angles: &[f32], x: &mut [f32]) {
        let half = self.spec.dim / 2;
        let (cosines, sines) = angles.split_at(half);
        for i in 0..half {
            let (a, b) = match self.spec.style {
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                RopeStyle::HalfSplit => (i, i + half),
            };
            let (u, v) = (x[a], x[b]);
            x[a] = u * cosines[i] - v * sines[i];
            x[b] = v * cosines[i] + u * sines[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(factor: f64, betas: (f64, f64), mscale: f64) -> Yarn {
        let (beta_fast, beta_slow) = betas;
        Yarn {
            factor,
            original_max_position_embeddings: 4096,
            beta_fast,
            beta_slow,
            mscale,
            mscale_all_dim: mscale,
        }
    }

    fn rope(theta: f64, yarn: Option<Yarn>, style: RopeStyle) -> Rope {
        Rope::new(RopeSpec { dim: 64, theta, yarn, style }).unwrap()
    }

    #[test]
    fn published_yarn_ranges_and_scales() {
        let v2 = yarn(40.0, (32.0, 1.0), 0.707);
        let v3 = yarn(40.0, (32.0, 1.0), 1.0);
        let k2 = yarn(32.0, (1.0, 1.0), 1.0);
        let k25 = yarn(64.0, (32.0, 1.0), 1.0);
        assert_eq!(blended(&v3, 64, 1e4), (10.0, 23.0));
        assert_eq!(blended(&k2, 64, 5e4), (19.0, 20.0));
        assert_eq!(blended(&k25, 64, 5e4), (8.0, 20.0));
        let published = [(1e4, v2, 0.114721), (1e4, v3, 0.135234), (5e4, k2, 0.130861), (5e4, k25, 0.144680)];
        for (theta, spec, want) in published {
            let got = rope(theta, Some(spec), RopeStyle::Interleaved).softmax_scale(192);
            assert!((got - want).abs() < 5e-7, "{got} against {want}");
        }
        assert_eq!(rope(1e4, None, RopeStyle::Interleaved).softmax_scale(64), 0.125);
    }

    #[test]
    fn frequencies_below_the_range_stay_and_above_are_divided() {
        let plain = rope(1e4, None, RopeStyle::Interleaved);
        let scaled = rope(1e4, Some(yarn(40.0, (32.0, 1.0), 1.0)), RopeStyle::Interleaved);
        assert_eq!(plain.frequencies[10], scaled.frequencies[10]);
        assert_eq!(plain.frequencies[23] / 40.0, scaled.frequencies[23]);
        assert!(scaled.frequencies[16] < plain.frequencies[16]);
        assert!(scaled.frequencies[16] > plain.frequencies[16] / 40.0);
    }

    #[test]
    fn attention_factor_scales_the_table() {
        let mut spec = yarn(40.0, (32.0, 1.0), 1.0);
        spec.mscale_all_dim = 0.0;
        let rope = rope(1e4, Some(spec), RopeStyle::Interleaved);
        assert_eq!(rope.gather([0].into_iter())[0], (0.1 * 40f64.ln() + 1.0) as f32);
        assert_eq!(rope.softmax_scale(64), 0.125);
    }

    #[test]
    fn rotation_pairs_by_style() {
        for style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
            let rope = rope(1e4, None, style);
            let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
            let position = 12_345;
            let mut y = x.clone();
            rope.rotate(&rope.gather([position].into_iter()), &mut y);
            for i in 0..32 {
                let (a, b) = if style == RopeStyle::Interleaved { (2 * i, 2 * i + 1) } else { (i, i + 32) };
                let angle = f64::from(position) * 1e4f64.powf(-(i as f64) / 32.0);
                let (u, v) = (f64::from(x[a]), f64::from(x[b]));
                assert!((f64::from(y[a]) - (u * angle.cos() - v * angle.sin())).abs() < 3e-7);
                assert!((f64::from(y[b]) - (v * angle.cos() + u * angle.sin())).abs() < 3e-7);
            }
        }
    }

    #[test]
    fn a_position_outside_the_table_is_computed_and_not_kept() {
        let rope = rope(1e4, None, RopeStyle::HalfSplit);
        let far = rope.gather([u32::MAX, 3].into_iter());
        assert_eq!(far[64..], rope.gather([3].into_iter()));
        assert_eq!(far[0], f64::from(u32::MAX).cos() as f32);
        assert_eq!(rope.table.read().unwrap().len(), FIRST_POSITIONS * 64);
    }

    #[test]
    fn bad_specs_are_refused() {
        let good = RopeSpec { dim: 64, theta: 1e4, yarn: None, style: RopeStyle::Interleaved };
        assert!(Rope::new(RopeSpec { dim: 63, ..good }).is_err());
        assert!(Rope::new(RopeSpec { theta: 1.0, ..good }).is_err());
        let broken = RopeSpec { yarn: Some(yarn(0.0, (32.0, 1.0), 1.0)), ..good };
        let text = Rope::new(broken).unwrap_err().to_string();
        assert_eq!(text, "rope: yarn factor is 0, limit finite and above 0");
    }
}

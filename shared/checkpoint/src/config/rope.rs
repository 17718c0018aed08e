use crate::Result;
use crate::json::Fields;

const DEFAULT_THETA: f64 = 10_000.0;

/// Rotary position embedding parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Context extension, applied at every length; `None` for plain rotary embedding.
    pub yarn: Option<Yarn>,
}

/// YaRN context extension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Scale of the context, s.
    pub factor: f64,
    /// Positions the model was trained on before extension.
    pub original_max_position_embeddings: usize,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is fully interpolated.
    pub beta_slow: f64,
    /// Coefficient of the numerator of the magnitude of cos and sin; 0 means unset.
    pub mscale: f64,
    /// Coefficient of its denominator, and squared in the softmax scale; 0 means unset.
    pub mscale_all_dim: f64,
}

impl RopeConfig {
    /// Reads `rope_scaling` (with a top-level `rope_theta`) or `rope_parameters` (with its own).
    pub(crate) fn read(root: &Fields<'_>, prefix: &str) -> Result<Self> {
        let theta = root.positive("rope_theta", DEFAULT_THETA)?;
        let spelling = ["rope_parameters", "rope_scaling"].into_iter().find(|key| root.get(key).is_some());
        let Some((key, value)) = spelling.and_then(|key| Some((key, root.get(key)?))) else {
            return Self::checked(theta, None, root);
        };
        let dotted = if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
        Self::read_scaling(&Fields::of(root.path(), &dotted, value)?, theta, root)
    }

    /// A base of 1 or below has no falling frequencies, and YaRN divides by its logarithm.
    fn checked(theta: f64, yarn: Option<Yarn>, owner: &Fields<'_>) -> Result<Self> {
        if theta > 1.0 {
            Ok(Self { theta, yarn })
        } else {
            Err(owner.refuse("rope_theta", "must be above 1"))
        }
    }

    fn read_scaling(scaling: &Fields<'_>, outer_theta: f64, root: &Fields<'_>) -> Result<Self> {
        let theta = scaling.positive("rope_theta", outer_theta)?;
        let (new, old) = (scaling.text("rope_type")?, scaling.text("type")?);
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            return Err(scaling.refuse("type", format!("disagrees with rope_type = {new}")));
        }
        let type_key = if new.is_some() { "rope_type" } else { "type" };
        let yarn = match new.or(old) {
            None if scaling.get("factor").is_some() => return Err(scaling.missing("rope_type")),
            None | Some("default") => None,
            Some("yarn") => Some(Yarn::read(scaling, root)?),
            Some(_) => return Err(scaling.refuse(type_key, "only default and yarn are supported")),
        };
        scaling.must_be_absent("mrope_section", "three-axis positions are not supported")?;
        let owner = if scaling.get("rope_theta").is_some() { scaling } else { root };
        Self::checked(theta, yarn, owner)
    }
}

impl Yarn {
    fn read(scaling: &Fields<'_>, root: &Fields<'_>) -> Result<Self> {
        let factor = scaling.opt_positive("factor")?.ok_or_else(|| scaling.missing("factor"))?;
        if factor < 1.0 {
            return Err(scaling.refuse("factor", "must be at least 1"));
        }
        let key = "original_max_position_embeddings";
        let original = match scaling.opt_size(key, super::MAX_POSITIONS)? {
            Some(n) => n,
            None => root.opt_size(key, super::MAX_POSITIONS)?.ok_or_else(|| scaling.missing(key))?,
        };
        Ok(Self {
            factor,
            original_max_position_embeddings: original,
            beta_fast: scaling.positive("beta_fast", 32.0)?,
            beta_slow: scaling.positive("beta_slow", 1.0)?,
            mscale: scaling.non_negative("mscale", 0.0)?,
            mscale_all_dim: scaling.non_negative("mscale_all_dim", 0.0)?,
        })
    }
}

//! Which target layers feed the draft: files disagree on what a written layer id means.

use crate::draft::{DraftConfig, WrittenAuxIds};

/// What a written aux layer id means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuxConvention {
    /// The residual stream entering that layer: canonical as written.
    Entering,
    /// The residual stream after that layer: canonical is one more.
    After,
}

/// The residual streams a draft is fed with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuxIds {
    /// Ids in `0..=layers`: id `i` is the stream entering layer `i`, `layers` the one before the final norm.
    pub canonical: Vec<usize>,
    /// Which rule led there, for people to check.
    pub rule: String,
}

/// Why a draft's aux ids cannot be used with a target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuxIdsError {
    /// Ids whose meaning the file does not tell.
    #[error(
        "eagle_aux_hidden_state_layer_ids = {written:?} do not tell whether they mean entering or after a layer of {layers}: set the aux convention to entering or after"
    )]
    Ambiguous {
        /// As in the file.
        written: Vec<usize>,
        /// Target layers.
        layers: usize,
    },
    /// Ids that are not increasing.
    #[error("aux ids {canonical:?} ({rule}) must be strictly increasing: features are joined by depth")]
    Order {
        /// After the rule.
        canonical: Vec<usize>,
        /// The rule.
        rule: String,
    },
    /// An id past the last layer.
    #[error("aux id {id} ({rule}) is over the limit of {layers} target layers")]
    Range {
        /// The id.
        id: usize,
        /// The rule.
        rule: String,
        /// Target layers.
        layers: usize,
    },
    /// More or fewer ids than the draft fuses.
    #[error("{found} aux ids ({rule}), the draft fuses num_aux_hidden_states = {wanted}")]
    Count {
        /// Ids found.
        found: usize,
        /// Ids wanted.
        wanted: usize,
        /// The rule.
        rule: String,
    },
    /// A target too shallow for the default ids.
    #[error("the draft names no aux layer ids and {layers} target layers are too few for the default")]
    TooShallow {
        /// Target layers.
        layers: usize,
    },
}

/// Resolves the ids a draft's file names, or the default, against a target of `layers` layers.
///
/// An explicit `convention` wins over what the file suggests. Fails when the meaning stays open, or when the ids are
/// not strictly increasing in `0..=layers` or not as many as the draft fuses.
pub fn aux_ids(
    draft: &DraftConfig,
    layers: usize,
    convention: Option<AuxConvention>,
) -> Result<AuxIds, AuxIdsError> {
    let ids = resolve(draft, layers, convention)?;
    let AuxIds { canonical, rule } = &ids;
    if !canonical.is_sorted_by(|a, b| a < b) {
        return Err(AuxIdsError::Order { canonical: canonical.clone(), rule: rule.clone() });
    }
    if let Some(&id) = canonical.iter().find(|&&id| id > layers) {
        return Err(AuxIdsError::Range { id, rule: rule.clone(), layers });
    }
    let (found, wanted) = (canonical.len(), draft.num_aux_hidden_states);
    if found != wanted {
        return Err(AuxIdsError::Count { found, wanted, rule: rule.clone() });
    }
    Ok(ids)
}

fn resolve(
    draft: &DraftConfig,
    layers: usize,
    convention: Option<AuxConvention>,
) -> Result<AuxIds, AuxIdsError> {
    let entering = (layers >= 4).then(|| [2, layers / 2, layers - 3]);
    let after = entering.map(|ids| ids.map(|id| id - 1));
    let (written, nested) = match &draft.written_aux_ids {
        WrittenAuxIds::Absent => {
            let canonical = entering.ok_or(AuxIdsError::TooShallow { layers })?.to_vec();
            return Ok(AuxIds { canonical, rule: "default: entering 2, n/2, n-3".to_owned() });
        }
        WrittenAuxIds::Nested(ids) => (ids, true),
        WrittenAuxIds::TopLevel(ids) => (ids, false),
    };
    let is = |set: Option<[usize; 3]>| set.is_some_and(|set| written[..] == set);
    let (meaning, rule) = match convention {
        Some(AuxConvention::Entering) => (AuxConvention::Entering, "aux convention: entering"),
        Some(AuxConvention::After) => (AuxConvention::After, "aux convention: after"),
        None if is(after) => (AuxConvention::After, "written 1, n/2-1, n-4: after"),
        None if is(entering) => (AuxConvention::Entering, "written 2, n/2, n-3: entering"),
        None if nested => (AuxConvention::After, "SpecForge or ModelOpt layout: after"),
        None => return Err(AuxIdsError::Ambiguous { written: written.clone(), layers }),
    };
    let shift = usize::from(meaning == AuxConvention::After);
    let canonical = written.iter().map(|id| id + shift).collect();
    Ok(AuxIds { canonical, rule: format!("{rule}, written {written:?}") })
}

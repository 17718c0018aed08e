use std::{fmt, str::FromStr};

use crate::MAX_NODES;

/// Widest beam of a tree.
pub const MAX_TOP_K: usize = 16;

/// Why a tree shape is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Not three numbers.
    #[error("tree must be TOP_KxLEVELSxNODES, such as 4x5x16, given {given:?}")]
    Format {
        /// The text given.
        given: String,
    },
    /// A number outside its range.
    #[error("tree {field} must be between {min} and {max}, given {given}")]
    Range {
        /// Which number.
        field: &'static str,
        /// Least value accepted.
        min: usize,
        /// Greatest value accepted.
        max: usize,
        /// The value given.
        given: usize,
    },
}

/// The shape of a dynamic tree, written `TOP_KxLEVELSxNODES`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TreeShape {
    top_k: usize,
    levels: usize,
    nodes: usize,
}

impl TreeShape {
    /// `top_k` children per node and nodes per beam, `levels` draft steps, `nodes` nodes with the
    /// root.
    ///
    /// # Errors
    /// `top_k` outside 1..=[`MAX_TOP_K`], `levels` outside 1..[`MAX_NODES`], or `nodes` outside
    /// 2..=[`MAX_NODES`] or beyond the `1 + top_k + (levels − 1)·top_k²` nodes that can be grown.
    pub fn try_new(top_k: usize, levels: usize, nodes: usize) -> Result<Self, ShapeError> {
        let check = |field, max, min, given: usize| {
            if (min..=max).contains(&given) {
                Ok(())
            } else {
                Err(ShapeError::Range { field, min, max, given })
            }
        };
        check("top-k", MAX_TOP_K, 1, top_k)?;
        check("levels", MAX_NODES - 1, 1, levels)?;
        let grown = 1 + top_k + (levels - 1) * top_k * top_k;
        check("nodes", MAX_NODES.min(grown), 2, nodes)?;
        Ok(Self { top_k, levels, nodes })
    }

    /// Children kept per node, and nodes kept per beam.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Draft steps: the greatest depth a node can have.
    #[must_use]
    pub fn levels(&self) -> usize {
        self.levels
    }

    /// Nodes of the finished tree, the root included.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes
    }
}

impl fmt::Display for TreeShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.top_k, self.levels, self.nodes)
    }
}

impl FromStr for TreeShape {
    type Err = ShapeError;

    fn from_str(text: &str) -> Result<Self, ShapeError> {
        let malformed = || ShapeError::Format { given: text.to_owned() };
        let numbers: Vec<usize> =
            text.split('x').map(|part| part.parse().map_err(|_| malformed())).collect::<Result<_, _>>()?;
        match numbers[..] {
            [top_k, levels, nodes] => Self::try_new(top_k, levels, nodes),
            _ => Err(malformed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        let shape: TreeShape = "4x5x16".parse().unwrap();
        assert_eq!((shape.top_k(), shape.levels(), shape.nodes()), (4, 5, 16));
        assert_eq!(shape.to_string(), "4x5x16");
    }

    #[test]
    fn refusals_name_the_number_and_its_limit() {
        let text = |t: &str| t.parse::<TreeShape>().unwrap_err().to_string();
        let format = "tree must be TOP_KxLEVELSxNODES, such as 4x5x16, given ";
        for bad in ["", "4", "4x5", "4x5x16x2", "4x-5x16", "axbxc", "4X5X16"] {
            assert_eq!(text(bad), format!("{format}{bad:?}"));
        }
        assert_eq!(text("0x5x16"), "tree top-k must be between 1 and 16, given 0");
        assert_eq!(text("17x5x16"), "tree top-k must be between 1 and 16, given 17");
        assert_eq!(text("4x0x16"), "tree levels must be between 1 and 63, given 0");
        assert_eq!(text("4x99999999999x16"), "tree levels must be between 1 and 63, given 99999999999");
        assert_eq!(text("4x5x1"), "tree nodes must be between 2 and 64, given 1");
        assert_eq!(text("4x5x65"), "tree nodes must be between 2 and 64, given 65");
        assert_eq!(text("2x2x8"), "tree nodes must be between 2 and 7, given 8");
        assert!("2x2x7".parse::<TreeShape>().is_ok());
    }
}

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::SynthSpec;

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A checkpoint folder.
    Folder(PathBuf),
    /// A seed.
    Synth(SynthSpec),
}

impl From<PathBuf> for ModelSource {
    fn from(dir: PathBuf) -> Self {
        Self::Folder(dir)
    }
}

impl<T: AsRef<OsStr> + ?Sized> From<&T> for ModelSource {
    fn from(dir: &T) -> Self {
        Self::Folder(dir.into())
    }
}

impl From<SynthSpec> for ModelSource {
    fn from(spec: SynthSpec) -> Self {
        Self::Synth(spec)
    }
}

impl ModelSource {
    /// The folder, if it is one.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Folder(dir) => Some(dir),
            Self::Synth(_) => None,
        }
    }

    /// The name to show: a folder's own, or what is made up.
    pub fn name(&self) -> String {
        match self {
            Self::Synth(spec) => spec.label(),
            Self::Folder(dir) => {
                let absolute = dir.canonicalize().unwrap_or_else(|_| dir.clone());
                absolute.file_name().unwrap_or(absolute.as_os_str()).to_string_lossy().into_owned()
            }
        }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Synth(spec) => write!(f, "synth:{spec}"),
            Self::Folder(dir) => dir.display().fmt(f),
        }
    }
}

//! Memory shared between processes: memfd, leases, epochs and the feature ring.
#![allow(missing_docs, reason = "stand-in, replaced at merge")]

pub trait Region: Send + Sync + std::fmt::Debug {
    fn bytes(&self) -> &[u8];
    fn kind(&self) -> RegionKind;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionKind {
    FileMap,
    Memfd,
    Local,
}

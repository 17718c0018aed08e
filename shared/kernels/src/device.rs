//! Which processor to compute on, and in what numbers.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;

/// Numbers of activations and caches; sums are float32 whatever they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// 32-bit floats: all that the CPU has, and on a GPU for comparing with it.
    F32,
    /// bfloat16.
    Bf16,
}

impl Activations {
    /// Bytes of one number.
    pub fn size(self) -> usize {
        match self {
            Activations::F32 => 4,
            Activations::Bf16 => 2,
        }
    }

    /// The same for tensors.
    pub fn dtype(self) -> DType {
        match self {
            Activations::F32 => DType::F32,
            Activations::Bf16 => DType::BF16,
        }
    }

    /// As kernels and options are named.
    pub fn name(self) -> &'static str {
        match self {
            Activations::F32 => "f32",
            Activations::Bf16 => "bf16",
        }
    }
}

impl FromStr for Activations {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            other => Err(format!("activations must be f32 or bf16, given {other:?}")),
        }
    }
}

/// A processor by name: `cpu`, `cuda` (the first GPU) or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Processor {
    /// The CPU.
    #[default]
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

impl Processor {
    /// What is usual there: float32 on the CPU, bfloat16 on a GPU.
    pub fn usual(self) -> Activations {
        match self {
            Self::Cpu => Activations::F32,
            Self::Cuda(_) => Activations::Bf16,
        }
    }
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for Processor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("a device must be cpu, cuda or cuda:N, given {text:?}");
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", ordinal)) => Ok(Self::Cuda(ordinal.parse().map_err(|_| refused())?)),
            _ => Err(refused()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_read_back_what_they_print() {
        for processor in [Processor::Cpu, Processor::Cuda(0), Processor::Cuda(7)] {
            assert_eq!(processor.to_string().parse(), Ok(processor));
        }
        assert_eq!("cuda".parse(), Ok(Processor::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cpu:0"] {
            let error = text.parse::<Processor>().unwrap_err();
            assert_eq!(error, format!("a device must be cpu, cuda or cuda:N, given {text:?}"));
        }
    }
}

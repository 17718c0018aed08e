//! Numeric kernels, once per backend, as candle custom ops.

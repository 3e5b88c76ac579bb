//! File and NVMe I/O below zoo's tensors: bytes, offsets and alignment, nothing about dtypes or shapes.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod align;

/// Version of the crate, as in its manifest.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

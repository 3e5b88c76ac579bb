//! Python bindings of `zoo-io`: arguments in, results and errors out, the interpreter's lock released while waiting.
#![deny(unsafe_op_in_unsafe_fn)]

mod engine;
mod errors;
mod memory;
mod owner;
mod sums;

/// The module `zoo.io._native`.
#[pyo3::pymodule]
mod _native {
    use pyo3::exceptions::PyValueError;
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::engine::{Bell, Engine, File, Registration, Ticket};
    #[pymodule_export]
    use crate::memory::{Ledger, Pool, cuda_problem};
    #[pymodule_export]
    use crate::sums::SmallSums;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = zoo_io::VERSION;

    /// `(start, stop)` of the head, the middle and the tail.
    type Parts = ((u64, u64), (u64, u64), (u64, u64));

    /// Cut the `num_bytes` bytes at `offset` at multiples of `alignment`.
    #[pyfunction]
    fn split_aligned(offset: u64, num_bytes: u64, alignment: u64) -> PyResult<Parts> {
        let parts = zoo_io::align::split(offset, num_bytes, alignment)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok((
            (parts.head.start, parts.head.end),
            (parts.middle.start, parts.middle.end),
            (parts.tail.start, parts.tail.end),
        ))
    }

    /// Bytes of an area of shared memory for the small sums of a group, and of the largest tensor; how many are in
    /// flight at most.
    #[pyfunction]
    fn small_sums_bytes(size: usize) -> (usize, usize, usize) {
        use zoo_io::small_sums::{SLOT_BYTES, SLOTS, area_bytes};
        (area_bytes(size), SLOT_BYTES, SLOTS)
    }

    /// CRC-32C of the `num_bytes` bytes at `address`, which the caller keeps alive.
    #[pyfunction]
    fn crc32c(py: Python<'_>, address: usize, num_bytes: usize) -> u32 {
        if num_bytes == 0 {
            return zoo_io::checksum::crc32c(&[]);
        }
        py.detach(|| {
            // SAFETY: the Python layer passes the memory of a tensor it holds.
            zoo_io::checksum::crc32c(unsafe { std::slice::from_raw_parts(address as *const u8, num_bytes) })
        })
    }
}

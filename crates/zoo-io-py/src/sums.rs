//! Small all-reduces of processes that share memory.

use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use zoo_io::small_sums::{self, Kind, Op};

fn kind_of(name: &str) -> PyResult<Kind> {
    match name {
        "float32" => Ok(Kind::F32),
        "float64" => Ok(Kind::F64),
        "bfloat16" => Ok(Kind::Bf16),
        "int64" => Ok(Kind::I64),
        other => Err(PyValueError::new_err(format!("elements of {other}"))),
    }
}

fn op_of(name: &str) -> PyResult<Op> {
    match name {
        "sum" => Ok(Op::Sum),
        "max" => Ok(Op::Max),
        "min" => Ok(Op::Min),
        other => Err(PyValueError::new_err(format!("{other} over ranks"))),
    }
}

/// See `zoo_io::small_sums::SmallSums`. The Python layer holds the memory, and what it passes addresses of.
#[pyclass(frozen)]
pub struct SmallSums(small_sums::SmallSums);

#[pymethods]
impl SmallSums {
    #[new]
    fn new(addresses: Vec<usize>, rank: usize) -> PyResult<Self> {
        if rank >= addresses.len() || addresses.iter().any(|&address| address == 0 || address % 64 != 0) {
            return Err(PyValueError::new_err("areas of shared memory that cannot be"));
        }
        // SAFETY: the Python layer maps the areas and holds them as long as this object.
        Ok(SmallSums(unsafe { small_sums::SmallSums::new(&addresses, rank) }))
    }

    /// The number of the sum; `None` where its slot is taken.
    fn post(&self, tag: i64, address: usize, num_bytes: usize) -> Option<u64> {
        // SAFETY: the memory of a contiguous tensor that the caller holds, with at least one byte.
        self.0.post(tag, unsafe { std::slice::from_raw_parts(address as *const u8, num_bytes) })
    }

    /// Whether the peer has posted, after at most `patience_s` seconds.
    fn wait(&self, py: Python<'_>, number: u64, peer: usize, patience_s: f64) -> bool {
        if self.0.is_there(number, peer) {
            return true;
        }
        let patience = Duration::try_from_secs_f64(patience_s).unwrap_or(Duration::MAX);
        py.detach(|| self.0.wait_awake(number, peer) || self.0.wait(number, peer, patience))
    }

    /// `None`, or rank, tag and bytes of what a peer has posted instead.
    fn combine(
        &self,
        number: u64,
        tag: i64,
        dtype: &str,
        op: &str,
        address: usize,
        num_bytes: usize,
    ) -> PyResult<Option<(usize, i64, u64)>> {
        // SAFETY: as in `post`; the tensor is this collective's until it is complete.
        let out = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, num_bytes) };
        let found = self.0.combine(number, tag, kind_of(dtype)?, op_of(op)?, out);
        Ok(found.err().map(|(rank, other)| (rank, other.tag, other.bytes)))
    }

    /// What peers have posted is read here, or never will be.
    fn finish(&self, number: u64) {
        self.0.finish(number);
    }
}

//! Pool buffers as DLPack capsules: the array library takes the memory without a copy and gives it back by a callback.

use std::ffi::{CStr, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use zoo_io::PoolBuffer;

use crate::errors::raise;
use crate::owner::let_go;

// The structures of dlpack.h, version 0.8: the exchange format of array libraries.
#[repr(C)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    num_dims: i32,
    dtype: DlType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

const CPU: DlDevice = DlDevice { kind: 1, id: 0 };
const UINT8: DlType = DlType { code: 1, bits: 8, lanes: 1 };
/// A consumer renames the capsule; one that still has this name was never taken.
const FRESH: &CStr = c"dltensor";

/// What the tensor points to: the memory, and its one dimension.
struct Backing {
    _buffer: PoolBuffer,
    shape: [i64; 1],
    strides: [i64; 1],
}

/// Called by the consumer when nobody uses the memory any more; on any thread, with or without the interpreter's lock.
unsafe extern "C" fn give_back(managed: *mut DlManagedTensor) {
    // SAFETY: both were made by `Box::into_raw` in `capsule`, and a deleter is called once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Backing>()));
    }
}

/// Called when the capsule dies.
unsafe extern "C" fn forget_capsule(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: Python passes the dying capsule; its pointer is valid while it has the name it was made with.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) == 1 {
            let managed = pyo3::ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr());
            give_back(managed.cast());
        }
    }
}

fn capsule(py: Python<'_>, buffer: PoolBuffer) -> PyResult<Bound<'_, PyCapsule>> {
    let (data, len) = (PoolBuffer::start(&buffer).as_ptr().cast(), PoolBuffer::len(&buffer) as i64);
    let backing = Box::into_raw(Box::new(Backing { _buffer: buffer, shape: [len], strides: [1] }));
    // SAFETY: `backing` was just made; the fields are in a box and do not move.
    let (shape, strides) = unsafe { (&raw mut (*backing).shape, &raw mut (*backing).strides) };
    let tensor = DlTensor {
        data,
        device: CPU,
        num_dims: 1,
        dtype: UINT8,
        shape: shape.cast(),
        strides: strides.cast(),
        byte_offset: 0,
    };
    let managed = Box::new(DlManagedTensor { tensor, context: backing.cast(), deleter: Some(give_back) });
    let managed = NonNull::from(Box::leak(managed));
    // SAFETY: the pointer stays valid until the deleter runs, and the name is static.
    let made = unsafe { PyCapsule::new_with_pointer_and_destructor(py, managed.cast(), FRESH, Some(forget_capsule)) };
    made.inspect_err(|_| {
        // SAFETY: nobody else has seen it.
        unsafe { give_back(managed.as_ptr()) }
    })
}

/// Why nothing can be page-locked here; `None` when it can.
#[pyfunction]
pub(crate) fn cuda_problem(py: Python<'_>) -> Option<String> {
    py.detach(zoo_io::memory::cuda).err()
}

/// An account of reserved bytes that pools of several processes share.
#[pyclass(frozen)]
pub(crate) struct Ledger {
    inner: Arc<zoo_io::Ledger>,
}

#[pymethods]
impl Ledger {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, capacity: u64) -> PyResult<Self> {
        let inner = py.detach(|| zoo_io::Ledger::open(&path, capacity)).map_err(|error| raise(py, &error))?;
        Ok(Ledger { inner })
    }

    /// Counts of now.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let dict = PyDict::new(py);
        dict.set_item("capacity_bytes", stats.capacity)?;
        dict.set_item("reserved_bytes", stats.reserved)?;
        dict.set_item("peak_bytes", stats.peak)?;
        Ok(dict)
    }
}

/// A bounded pool of aligned memory.
#[pyclass(frozen)]
pub(crate) struct Pool {
    inner: Arc<zoo_io::Pool>,
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (capacity, page_locked, segment, ledger=None))]
    fn new(
        py: Python<'_>,
        capacity: usize,
        page_locked: bool,
        segment: usize,
        ledger: Option<&Ledger>,
    ) -> PyResult<Self> {
        let ledger = ledger.map(|ledger| Arc::clone(&ledger.inner));
        let lock =
            if page_locked { Some(py.detach(zoo_io::memory::cuda).map_err(PyRuntimeError::new_err)?) } else { None };
        let inner = zoo_io::Pool::with_ledger(capacity, lock, segment, ledger).map_err(|error| raise(py, &error))?;
        Ok(Pool { inner })
    }

    /// A DLPack capsule of `num_bytes` bytes.
    fn take<'py>(&self, py: Python<'py>, num_bytes: usize) -> PyResult<Bound<'py, PyCapsule>> {
        let_go(py);
        let buffer = py.detach(|| self.inner.take(num_bytes)).map_err(|error| raise(py, &error))?;
        capsule(py, buffer)
    }

    /// Keep `num_bytes` for the buffers to come.
    fn set_aside(&self, py: Python<'_>, num_bytes: usize) -> PyResult<()> {
        let_go(py);
        py.detach(|| self.inner.set_aside(num_bytes)).map_err(|error| raise(py, &error))
    }

    /// Give unused memory back to the system.
    fn trim(&self, py: Python<'_>) {
        let_go(py);
        py.detach(|| self.inner.trim());
    }

    /// Whether the memory at `address` belongs to it.
    fn owns(&self, address: usize) -> bool {
        self.inner.owns(address)
    }

    /// Whether its memory is locked for a GPU.
    #[getter]
    fn page_locked(&self) -> bool {
        self.inner.is_page_locked()
    }

    /// Counts of now.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let_go(py);
        let stats = self.inner.stats();
        let dict = PyDict::new(py);
        for (name, value) in [
            ("capacity_bytes", stats.capacity as u64),
            ("reserved_bytes", stats.reserved as u64),
            ("in_use_bytes", stats.in_use as u64),
            ("peak_bytes", stats.peak as u64),
            ("buffers", stats.buffers as u64),
            ("allocations", stats.allocations),
            ("regions", stats.regions as u64),
        ] {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }
}

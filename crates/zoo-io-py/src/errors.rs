//! Errors of `zoo-io` as the exceptions of `zoo.io.errors`.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use zoo_io::Error;
use zoo_io::error::Place;

/// `class(message, errno, path, offset, length)` of `zoo.io.errors`.
fn at_place(py: Python<'_>, class: &str, message: &str, errno: Option<i32>, place: &Place) -> PyResult<PyErr> {
    let class = py.import("zoo.io.errors")?.getattr(class)?;
    let path = place.path.to_string_lossy().into_owned();
    Ok(PyErr::from_value(class.call1((message, errno, path, place.offset, place.len))?))
}

fn of_message(py: Python<'_>, class: &str, message: &str) -> PyResult<PyErr> {
    Ok(PyErr::from_value(py.import("zoo.io.errors")?.getattr(class)?.call1((message,))?))
}

/// The exception that says what `error` says.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    let made = match error {
        Error::Os { errno, place, .. } => at_place(py, "TransferError", &message, Some(*errno), place),
        Error::UnexpectedEnd { place, .. } => at_place(py, "UnexpectedEndError", &message, None, place),
        Error::Gpu { place, .. } | Error::NoProgress { place, .. } => {
            at_place(py, "TransferError", &message, None, place)
        }
        Error::Checksum { place, .. } => at_place(py, "ChecksumError", &message, None, place),
        Error::Cancelled { place, .. } => at_place(py, "CancelledError", &message, None, place),
        Error::Unavailable(_) => of_message(py, "UnavailableError", &message),
        Error::NoRoom(_) => of_message(py, "PoolExhaustedError", &message),
        Error::Closed | Error::Invalid(_) => Ok(PyValueError::new_err(message)),
        Error::Forked { .. } | Error::PoolForked { .. } | Error::WorkerDied(_) => Ok(PyRuntimeError::new_err(message)),
    };
    made.unwrap_or_else(|failure| failure)
}

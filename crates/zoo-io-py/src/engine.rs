//! Files, the engine and its tickets.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use zoo_io::{
    BackendChoice, Buffer, DirectMode, Direction, Fault, FaultKind, Gpu, MockPlan, Request, RingOptions, Target,
};

use crate::errors::raise;
use crate::owner::{Owner, let_go};

/// A Ctrl-C is noticed this soon while waiting.
const SLICE: Duration = Duration::from_millis(100);

fn direction(write: bool) -> Direction {
    if write { Direction::Write } else { Direction::Read }
}

/// Wait in slices, so that signals are handled; `look` says whether it is over.
fn patiently<T: Send>(
    py: Python<'_>,
    timeout: Option<f64>,
    look: impl Fn(Duration) -> Option<T> + Send + Sync,
) -> PyResult<Option<T>> {
    let deadline = match timeout {
        Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
            return Err(PyValueError::new_err(format!("timeout = {seconds}; allowed is 0 or more (seconds), or None")));
        }
        // One that is too far away is none.
        Some(seconds) => Duration::try_from_secs_f64(seconds).ok().and_then(|d| Instant::now().checked_add(d)),
        None => None,
    };
    loop {
        let left = deadline.map_or(SLICE, |d| d.saturating_duration_since(Instant::now()).min(SLICE));
        if let Some(found) = py.detach(|| look(left)) {
            return Ok(Some(found));
        }
        py.check_signals()?;
        if deadline.is_some_and(|d| Instant::now() >= d) {
            return Ok(None);
        }
    }
}

/// An open file.
#[pyclass(frozen)]
pub(crate) struct File {
    inner: Mutex<Option<Arc<zoo_io::File>>>,
}

impl File {
    fn get(&self) -> PyResult<Arc<zoo_io::File>> {
        self.inner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .ok_or_else(|| PyValueError::new_err("the file is closed; open it again"))
    }
}

#[pymethods]
impl File {
    /// `direct` is `auto`, `always` or `never`; `kept` files are registered in rings.
    #[new]
    fn new(py: Python<'_>, path: PathBuf, write: bool, direct: &str, kept: bool) -> PyResult<Self> {
        let mode = match direct {
            "auto" => DirectMode::Auto,
            "always" => DirectMode::Always,
            "never" => DirectMode::Never,
            other => {
                return Err(PyValueError::new_err(format!(
                    "direct = {other:?}; allowed are \"auto\", \"always\" and \"never\""
                )));
            }
        };
        let file =
            py.detach(|| zoo_io::File::open(&path, direction(write), mode, kept)).map_err(|error| raise(py, &error))?;
        Ok(File { inner: Mutex::new(Some(Arc::new(file))) })
    }

    /// Alignments of memory and offsets of direct transfers, in bytes; `None` when it is buffered.
    #[getter]
    fn alignment(&self) -> PyResult<Option<(u64, u64)>> {
        Ok(self.get()?.alignment().map(|a| (a.memory, a.offset)))
    }

    /// Why a file that may be direct is not.
    #[getter]
    fn why_buffered(&self) -> PyResult<Option<String>> {
        Ok(self.get()?.why_buffered().map(str::to_owned))
    }

    /// Size in bytes, now.
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        self.get()?.size().map_err(|error| raise(py, &error))
    }

    /// Close it as soon as no operation uses it.
    fn close(&self) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.get().is_err()
    }
}

/// Memory of a Python object, which is kept alive.
struct Foreign {
    address: usize,
    len: usize,
    gpu: Option<Gpu>,
    _owner: Owner,
}

/// Number of a GPU, and the event after which its memory may be used.
type GpuArgs = Option<(i32, usize)>;

fn gpu_of(gpu: GpuArgs) -> Option<Gpu> {
    gpu.map(|(device, ready)| Gpu { device, ready })
}

// SAFETY: the Python layer passes address and size of a contiguous tensor, and the GPU if it is there, with its storage.
unsafe impl Buffer for Foreign {
    fn start(&mut self) -> *mut u8 {
        self.address as *mut u8
    }
    fn len(&self) -> usize {
        self.len
    }
    fn gpu(&self) -> Option<Gpu> {
        self.gpu
    }
}

/// `(direction or None, offset, length, times or None, kind, number)`.
type FaultArgs = (Option<bool>, u64, u64, Option<u32>, String, f64);
/// `(seed, reorder, short of 256, faults)`.
type MockArgs = (u64, bool, u8, Vec<FaultArgs>);

fn mock_plan((seed, reorder, short, faults): MockArgs) -> PyResult<MockPlan> {
    let faults = faults.into_iter().map(|(write, offset, len, times, kind, number)| {
        let what = match kind.as_str() {
            "errno" => FaultKind::Errno(number as i32),
            "short" => FaultKind::Short(number as usize),
            "delay" => FaultKind::Delay(Duration::try_from_secs_f64(number).unwrap_or_default()),
            other => return Err(PyValueError::new_err(format!("fault {other:?}; allowed are errno, short, delay"))),
        };
        Ok(Fault { direction: write.map(direction), offset, len, times, what })
    });
    Ok(MockPlan { seed, reorder, short, faults: faults.collect::<PyResult<_>>()? })
}

/// What `wait` found: operations that ended, failures not told before, failures only counted, still in flight.
type Found = (u64, Vec<PyErr>, u64, usize);

/// The engine.
#[pyclass(frozen)]
pub(crate) struct Engine {
    inner: zoo_io::Engine,
    most_bounce_bytes: usize,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (*, block_size, queue_depth, num_threads, single_submit, overlap_events, bounce_bytes, backend,
                        mock=None, sqpoll_idle_ms=None, iopoll=false))]
    #[allow(clippy::too_many_arguments)] // keyword-only, from one place
    fn new(
        py: Python<'_>,
        block_size: usize,
        queue_depth: usize,
        num_threads: usize,
        single_submit: bool,
        overlap_events: bool,
        bounce_bytes: usize,
        backend: &str,
        mock: Option<MockArgs>,
        sqpoll_idle_ms: Option<u32>,
        iopoll: bool,
    ) -> PyResult<Self> {
        let backend = match (backend, mock) {
            ("mock", Some(mock)) => BackendChoice::Mock(mock_plan(mock)?),
            ("auto", None) => BackendChoice::Auto,
            ("uring", None) => BackendChoice::Uring,
            ("threads", None) => BackendChoice::Threads,
            ("gds", None) => BackendChoice::Gds,
            (other, _) => {
                return Err(PyValueError::new_err(format!(
                    "backend = {other:?}; allowed are \"auto\", \"uring\", \"threads\" and a Mock"
                )));
            }
        };
        let settings = zoo_io::Settings {
            block_size,
            queue_depth,
            num_threads,
            single_submit,
            overlap_events,
            bounce_bytes,
            backend,
            ring: RingOptions { sqpoll_idle_ms, iopoll },
        };
        let inner = py.detach(|| zoo_io::Engine::new(&settings)).map_err(|error| raise(py, &error))?;
        Ok(Engine { inner, most_bounce_bytes: settings.most_bounce_bytes() })
    }

    /// The most that its bounce buffers ever take.
    #[getter]
    fn most_bounce_bytes(&self) -> usize {
        self.most_bounce_bytes
    }

    /// `uring`, `threads`, `gds` or `mock`.
    #[getter]
    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    /// What was decided against the first choice since the last time.
    fn notices(&self) -> Vec<String> {
        self.inner.notices()
    }

    /// Begin moving `num_bytes` bytes between `address`, which `owner` keeps alive, and the files at `offset`.
    #[allow(clippy::too_many_arguments)] // from one place
    fn submit(
        &self,
        py: Python<'_>,
        files: Vec<PyRef<'_, File>>,
        stripe: u64,
        write: bool,
        offset: u64,
        address: usize,
        num_bytes: usize,
        owner: Py<PyAny>,
        checksum: bool,
        expected: Option<u32>,
        durable: bool,
        urgent: bool,
        whole: bool,
        gpu: GpuArgs,
    ) -> PyResult<Ticket> {
        let files = files.iter().map(|file| file.get()).collect::<PyResult<Vec<_>>>()?;
        let buffer = Box::new(Foreign { address, len: num_bytes, gpu: gpu_of(gpu), _owner: Owner::new(owner) });
        let begun = py.detach(|| {
            let target = Target::striped(files, stripe)?;
            let direction = direction(write);
            self.inner.submit(Request { direction, target, offset, buffer, checksum, expected, durable, urgent, whole })
        });
        let_go(py);
        begun.map(|inner| Ticket { inner }).map_err(|error| raise(py, &error))
    }

    /// Let GPUDirect Storage know memory of a GPU, until what is returned is closed.
    fn register(
        &self,
        py: Python<'_>,
        address: usize,
        num_bytes: usize,
        owner: Py<PyAny>,
        gpu: GpuArgs,
    ) -> PyResult<Registration> {
        let buffer = Box::new(Foreign { address, len: num_bytes, gpu: gpu_of(gpu), _owner: Owner::new(owner) });
        let made = py.detach(|| self.inner.register(buffer)).map_err(|error| raise(py, &error))?;
        Ok(Registration { inner: Mutex::new(Some(made)) })
    }

    /// Wait until nothing is in flight, or for so many seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Found> {
        let found = patiently(py, timeout, |slice| match self.inner.wait(Some(slice)) {
            Ok(report) if report.in_flight > 0 => None,
            other => Some(other),
        })?;
        let_go(py);
        match found {
            None => Ok((0, Vec::new(), 0, self.inner.stats().in_flight as usize)),
            Some(Err(error)) => Err(raise(py, &error)),
            Some(Ok(report)) => {
                let failures = report.failures.iter().map(|error| raise(py, error)).collect();
                Ok((report.finished, failures, report.forgotten, 0))
            }
        }
    }

    /// Take no more, give up what was not begun.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.inner.abort());
    }

    /// Take no more, finish what was submitted, end the threads. A signal may end it earlier, and then it can be called
    /// again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        patiently(py, None, |slice| self.inner.wind_down(slice).then_some(()))?;
        py.detach(|| self.inner.close());
        let_go(py);
        Ok(())
    }

    /// The same where no exception can be raised: whatever signals come.
    fn finish(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
        let_go(py);
    }

    /// Let idle workers let go of closed files.
    fn rouse(&self) {
        self.inner.rouse();
    }

    /// Something an event loop can watch.
    fn bell(&self, py: Python<'_>) -> PyResult<Bell> {
        Ok(Bell { inner: self.inner.bell().map_err(|error| raise(py, &error))? })
    }

    /// Counts since it was made.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let dict = PyDict::new(py);
        for (name, value) in [
            ("operations", stats.operations),
            ("in_flight", stats.in_flight),
            ("transfers", stats.transfers),
            ("fixed_transfers", stats.fixed_transfers),
            ("retries", stats.retries),
            ("direct_bytes", stats.direct_bytes),
            ("bounced_bytes", stats.bounced_bytes),
            ("buffered_bytes", stats.buffered_bytes),
            ("gpu_bytes", stats.gpu_bytes),
        ] {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }
}

/// Memory of a GPU that GPUDirect Storage knows.
#[pyclass(frozen)]
pub(crate) struct Registration {
    inner: Mutex<Option<Arc<zoo_io::Registration>>>,
}

#[pymethods]
impl Registration {
    /// Forget it as soon as no operation uses it.
    fn close(&self) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Readable whenever an operation has ended.
#[pyclass(frozen)]
pub(crate) struct Bell {
    inner: Arc<zoo_io::EventFd>,
}

#[pymethods]
impl Bell {
    /// The descriptor.
    fn fileno(&self) -> i32 {
        self.inner.as_raw_fd()
    }

    /// Make it unreadable until the next end.
    fn reset(&self) {
        self.inner.sleep();
    }
}

/// One operation.
#[pyclass(frozen)]
pub(crate) struct Ticket {
    inner: zoo_io::Ticket,
}

#[pymethods]
impl Ticket {
    /// Whether it is over; then the memory is let go of.
    fn done(&self, py: Python<'_>) -> bool {
        let done = self.inner.is_done();
        if done {
            drop(self.inner.take_buffer());
            let_go(py);
        }
        done
    }

    /// `(bytes, checksum or None)`, or `None` when the time was over first.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<(u64, Option<u32>)>> {
        let Some(result) = patiently(py, timeout, |slice| self.inner.wait(Some(slice)))? else {
            return Ok(None);
        };
        drop(self.inner.take_buffer());
        let_go(py);
        result.map(|done| Some((done.num_bytes, done.checksum))).map_err(|error| raise(py, &error))
    }
}

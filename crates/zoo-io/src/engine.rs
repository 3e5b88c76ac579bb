//! The engine: workers, their queue, and the door through which operations come in.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::backend::Backend;
use crate::backend::mock::{Mock, MockPlan, SharedPlan};
use crate::backend::threads::Blocking;
use crate::backend::uring::{RingOptions, Uring};
use crate::driver::{Counters, Driver, Habits};
use crate::error::{Direction, Error, errno_of, strerror};
use crate::file::{File, Target};
use crate::gds::{self, CuFile, Registration, Route};
use crate::memory::{self, Returning};
use crate::op::{Buffer, Op, Pending, Report, Request, Ticket, Tracker};
use crate::plan::{Plan, is_multiple};
use crate::queue::{MAX_WORKERS, Queue, Sleepers};
use crate::sync::{Alarm, Mutex, lock};
use crate::sys::{self, EventFd};

/// What carries the transfers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// io_uring, or blocking threads where the kernel refuses it; [`Engine::notices`] then says so.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// Blocking threads.
    Threads,
    /// GPUDirect Storage, for memory of GPUs and no other, on blocking threads.
    Gds,
    /// A device that misbehaves on order.
    Mock(MockPlan),
}

/// Settings of an engine.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Largest transfer in bytes: a multiple of 4096, at most 1 GiB.
    pub block_size: usize,
    /// Transfers a worker keeps in flight, 1 to 4096.
    pub queue_depth: usize,
    /// Workers that share the blocks of all operations, 1 to 64; each has a thread and a ring.
    pub num_threads: usize,
    /// Hand every transfer to the kernel by itself instead of many at once.
    pub single_submit: bool,
    /// Begin new transfers as others complete, instead of one full queue after the other.
    pub overlap_events: bool,
    /// Bytes of bounce buffers a worker has, for memory the device cannot reach; at least two blocks are made.
    pub bounce_bytes: usize,
    /// What carries the transfers.
    pub backend: BackendChoice,
    /// Of the io_uring backend.
    pub ring: RingOptions,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            block_size: 1 << 20,
            queue_depth: 8,
            num_threads: 1,
            single_submit: false,
            overlap_events: true,
            bounce_bytes: 16 << 20,
            backend: BackendChoice::Auto,
            ring: RingOptions::default(),
        }
    }
}

impl Settings {
    fn check(&self) -> Result<(), Error> {
        let wrong = |text: String| Err(Error::Invalid(text));
        if self.block_size == 0 || !self.block_size.is_multiple_of(4096) || self.block_size > 1 << 30 {
            return wrong(format!(
                "block_size = {}; allowed are multiples of 4096 up to 1073741824 (bytes)",
                self.block_size
            ));
        }
        if !(1..=4096).contains(&self.queue_depth) {
            return wrong(format!("queue_depth = {}; allowed is 1 to 4096", self.queue_depth));
        }
        if !(1..=MAX_WORKERS).contains(&self.num_threads) {
            return wrong(format!("num_threads = {}; allowed is 1 to {MAX_WORKERS}", self.num_threads));
        }
        let of_rings = matches!(self.backend, BackendChoice::Auto | BackendChoice::Uring);
        if !of_rings && self.ring != RingOptions::default() {
            return wrong(
                "sqpoll_idle_ms and iopoll are settings of io_uring; allowed are the backends \"uring\" and \"auto\""
                    .to_owned(),
            );
        }
        if self.bounce_bytes > 1 << 34 {
            return wrong(format!("bounce_bytes = {}; allowed is up to 17179869184", self.bounce_bytes));
        }
        Ok(())
    }

    /// The most that the bounce buffers of all workers take.
    pub fn most_bounce_bytes(&self) -> usize {
        self.num_threads * self.habits().slots(self.queue_depth) * self.habits().slot_bytes()
    }

    fn habits(&self) -> Habits {
        Habits {
            block: self.block_size,
            bounce: self.bounce_bytes,
            single_submit: self.single_submit,
            overlap: self.overlap_events,
        }
    }
}

/// Counts since the engine was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Operations submitted.
    pub operations: u64,
    /// Operations not over.
    pub in_flight: u64,
    /// System calls' worth of work.
    pub transfers: u64,
    /// Of those, with memory registered in the ring.
    pub fixed_transfers: u64,
    /// Of those, the continuation of a short one or of one that was interrupted.
    pub retries: u64,
    /// Bytes between device and caller's memory.
    pub direct_bytes: u64,
    /// Bytes by way of a bounce buffer.
    pub bounced_bytes: u64,
    /// Bytes through the page cache.
    pub buffered_bytes: u64,
    /// Bytes between device and memory of a GPU.
    pub gpu_bytes: u64,
}

struct Shared {
    queue: Arc<Queue<Pending>>,
    alarms: Vec<Arc<Alarm>>,
    tracker: Arc<Tracker>,
    counters: Arc<Counters>,
    died: Mutex<Option<String>>,
    returning: Returning,
}

impl Shared {
    fn wake(&self, sleepers: Sleepers) {
        for (worker, alarm) in self.alarms.iter().enumerate() {
            if sleepers & (1 << worker) != 0 {
                alarm.wake();
            }
        }
    }

    /// Fail what nobody has begun.
    fn cancel(&self, error: impl Fn(&Op) -> Error) {
        let (pending, sleepers) = self.queue.abort();
        self.wake(sleepers);
        for source in pending {
            source.op.fail(error(&source.op));
            if source.op.part_over() {
                source.op.finish();
            }
        }
    }
}

/// Moves bytes between memory and files on threads of its own.
///
/// Dropping it waits for everything that was submitted; [`Engine::abort`] gives up what was not begun.
pub struct Engine {
    shared: Arc<Shared>,
    threads: std::sync::Mutex<Vec<JoinHandle<()>>>,
    next: AtomicU64,
    block: u64,
    name: &'static str,
    cufile: Option<Arc<CuFile>>,
}

type Maker<B> = dyn Fn(usize, Arc<Alarm>) -> std::io::Result<B> + Send + Sync;

impl Engine {
    /// Start the workers.
    ///
    /// # Errors
    /// [`Error::Invalid`] for settings out of range, [`Error::Unavailable`] when a demanded backend is not to be had.
    pub fn new(settings: &Settings) -> Result<Engine, Error> {
        settings.check()?;
        match &settings.backend {
            BackendChoice::Auto => match Self::uring(settings) {
                Ok(engine) => Ok(engine),
                Err(errno) => {
                    let engine = Self::threads(settings)?;
                    engine.notices_mut().push(format!(
                        "io_uring is refused by the kernel ({}, errno {errno}): transfers run on {} blocking threads",
                        strerror(errno),
                        engine.shared.alarms.len(),
                    ));
                    Ok(engine)
                }
            },
            BackendChoice::Uring => Self::uring(settings).map_err(|errno| {
                Error::Unavailable(format!(
                    "io_uring is refused by the kernel: {} (errno {errno}); use the backend \"threads\" or \"auto\"",
                    strerror(errno)
                ))
            }),
            BackendChoice::Threads => Self::threads(settings),
            BackendChoice::Gds => Self::gds(settings),
            BackendChoice::Mock(plan) => {
                let plan: SharedPlan = Arc::new(std::sync::Mutex::new(plan.clone()));
                let depth = settings.queue_depth;
                Self::start(settings, "mock", settings.num_threads, move |worker, alarm| {
                    Ok(Mock::new(Arc::clone(&plan), depth, worker, alarm))
                })
                .map_err(|errno| Error::Unavailable(strerror(errno)))
            }
        }
    }

    fn uring(settings: &Settings) -> Result<Engine, i32> {
        let (depth, options) = (settings.queue_depth, settings.ring);
        Self::start(settings, "uring", settings.num_threads, move |_, alarm| Uring::new(depth, options, alarm))
    }

    fn gds(settings: &Settings) -> Result<Engine, Error> {
        let cufile =
            gds::cufile().map_err(|why| Error::Unavailable(format!("GPUDirect Storage is not to be had: {why}")))?;
        let mut engine = Self::blocking(settings, "gds")?;
        engine.cufile = Some(cufile);
        Ok(engine)
    }

    fn threads(settings: &Settings) -> Result<Engine, Error> {
        Self::blocking(settings, "threads")
    }

    fn blocking(settings: &Settings, name: &'static str) -> Result<Engine, Error> {
        let workers = (settings.num_threads * settings.queue_depth).min(MAX_WORKERS);
        Self::start(settings, name, workers, |_, alarm| Ok(Blocking::new(alarm)))
            .map_err(|errno| Error::Unavailable(format!("{workers} threads: {}", strerror(errno))))
    }

    pub(crate) fn start<B: Backend + 'static>(
        settings: &Settings,
        name: &'static str,
        workers: usize,
        make: impl Fn(usize, Arc<Alarm>) -> std::io::Result<B> + Send + Sync + 'static,
    ) -> Result<Engine, i32> {
        let make: Arc<Maker<B>> = Arc::new(make);
        let engine = Self::without_threads(settings, name, workers).map_err(|error| errno_of(&error))?;
        let (report, reports) = mpsc::channel();
        for worker in 0..workers {
            let (shared, make, report) = (Arc::clone(&engine.shared), Arc::clone(&make), report.clone());
            let habits = settings.habits();
            let thread = std::thread::Builder::new()
                .name(format!("zoo-io-{worker}"))
                .spawn(move || work(&shared, worker, habits, &*make, &report))
                .map_err(|error| errno_of(&error))?;
            engine.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        drop(report);
        for outcome in reports.iter().take(workers) {
            outcome?;
        }
        Ok(engine)
    }

    fn without_threads(settings: &Settings, name: &'static str, workers: usize) -> std::io::Result<Engine> {
        let alarms: std::io::Result<Vec<_>> = (0..workers).map(|_| Alarm::new(false).map(Arc::new)).collect();
        let shared = Arc::new(Shared {
            queue: Arc::new(Queue::new()),
            alarms: alarms?,
            tracker: Arc::default(),
            counters: Arc::default(),
            died: Mutex::new(None),
            returning: Returning::default(),
        });
        let (threads, next) = (std::sync::Mutex::default(), AtomicU64::new(0));
        Ok(Engine { shared, threads, next, block: settings.block_size as u64, name, cufile: None })
    }

    /// `uring`, `threads`, `gds` or `mock`.
    pub fn backend(&self) -> &'static str {
        self.name
    }

    fn notices_mut(&self) -> MutexGuard<'_, Vec<String>> {
        self.shared.counters.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was decided against the first choice since the last time, in sentences.
    pub fn notices(&self) -> Vec<String> {
        if !self.is_here() {
            return Vec::new();
        }
        std::mem::take(&mut self.notices_mut())
    }

    fn check_usable(&self) -> Result<(), Error> {
        self.shared.tracker.check_process()?;
        match &*lock(&self.shared.died) {
            Some(why) => Err(Error::WorkerDied(why.clone())),
            None => Ok(()),
        }
    }

    /// Begin an operation. All checks that need no transfer happen here; a write's space is allocated here.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a file that is open the other way, a range past 63 bits, or another size than that of a file
    /// that is read whole, [`Error::UnexpectedEnd`] for a
    /// read past the end, [`Error::Os`] when there is no space, [`Error::Closed`], [`Error::Forked`].
    pub fn submit(&self, mut request: Request) -> Result<Ticket, Error> {
        self.check_usable()?;
        let route = self.route(&mut request)?;
        check(&request)?;
        let (direction, len, urgent) = (request.direction, request.buffer.len() as u64, request.urgent);
        let start = request.buffer.start();
        let plan = Plan::new(direction, &request.target, request.offset, len, start as u64, self.block);
        let plan = if route.is_some() { plan.of_gpu() } else { plan };
        let in_place = |file: &Arc<File>| file.alignment().is_some_and(|of| is_multiple(start as u64, of.memory));
        if route.is_none()
            && request.target.files().iter().any(in_place)
            && memory::find(start as usize, request.buffer.len()).is_none()
        {
            self.shared.returning.comes(start as usize, request.buffer.len());
        }
        let (id, tracker) = (self.next.fetch_add(1, Ordering::Relaxed), Arc::clone(&self.shared.tracker));
        let op = Op::new(id, request, start, route, tracker);
        self.shared.counters.operations.fetch_add(1, Ordering::Relaxed);
        let ticket = Ticket(Arc::clone(&op));
        if len == 0 {
            finish_empty(&op);
            return Ok(ticket);
        }
        let workers = len.div_ceil(self.block).min(MAX_WORKERS as u64) as usize;
        match self.shared.queue.push(Pending { op: Arc::clone(&op), plan }, workers, urgent) {
            Ok(sleepers) => {
                self.shared.wake(sleepers);
                Ok(ticket)
            }
            Err(_) => {
                op.fail(Error::Closed);
                op.finish();
                ticket.wait(None);
                Err(Error::Closed)
            }
        }
    }

    /// How memory of a GPU travels; `None` for the host's.
    fn route(&self, request: &mut Request) -> Result<Option<Route>, Error> {
        let (cufile, gpu) = match (&self.cufile, request.buffer.gpu()) {
            (None, None) => return Ok(None),
            (Some(cufile), Some(gpu)) => (cufile, gpu),
            (Some(_), None) => {
                return Err(Error::Invalid(
                    "memory of the host for an engine of GPUDirect Storage; use another backend".to_owned(),
                ));
            }
            (None, Some(_)) => {
                return Err(Error::Invalid(format!(
                    "memory of a GPU for the backend {:?}; allowed is \"gds\", or copy it through a buffer of a pool",
                    self.name
                )));
            }
        };
        if request.checksum || request.expected.is_some() {
            return Err(Error::Invalid(
                "a checksum of memory of a GPU; the CPU makes them and does not see it: leave it out, or copy the tensor \
                 through a buffer of a pool"
                    .to_owned(),
            ));
        }
        let (start, len) = (request.buffer.start() as usize, request.buffer.len());
        let files: Result<Vec<_>, Error> = request.target.files().iter().map(|file| file.for_gpu(cufile)).collect();
        Ok(Some(Route { files: files?, memory: cufile.registration_of(start, len), gpu }))
    }

    /// Let GPUDirect Storage know memory of a GPU: transfers within it then need no memory of the library's in between.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another backend and for memory of the host, [`Error::Unavailable`] when it is refused.
    pub fn register(&self, buffer: Box<dyn Buffer>) -> Result<Arc<Registration>, Error> {
        self.check_usable()?;
        match (&self.cufile, buffer.gpu(), buffer.len()) {
            (Some(cufile), Some(_), 1..) => cufile.register_memory(buffer).map_err(Error::Unavailable),
            _ => Err(Error::Invalid(format!(
                "{} bytes to register with the backend {:?}; allowed is memory of a GPU, one byte or more, with \"gds\"",
                buffer.len(),
                self.name
            ))),
        }
    }

    /// Wait until nothing is in flight or the time is over.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Report, Error> {
        self.shared.tracker.check_process()?;
        Ok(self.shared.tracker.wait(timeout))
    }

    /// Take no more operations, give up those not begun, and return at once; their tickets say so.
    pub fn abort(&self) {
        if self.is_here() {
            self.shared.cancel(|op| Error::Cancelled { direction: op.direction, place: op.place() });
        }
    }

    /// Take no more operations; whether all that were submitted are over, now or before the time is. [`Engine::close`]
    /// has nothing to wait for then but the ends of idle threads.
    pub fn wind_down(&self, timeout: Duration) -> bool {
        if !self.is_here() {
            return true;
        }
        self.shared.wake(self.shared.queue.close());
        self.shared.tracker.is_idle_within(timeout)
    }

    /// Take no more operations, finish all that were submitted, and end the threads.
    pub fn close(&self) {
        if !self.is_here() {
            return;
        }
        let sleepers = self.shared.queue.close();
        self.shared.wake(sleepers);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A worker catches its own panics; what is left to join is its end.
            let _ = thread.join();
        }
    }

    /// Let idle workers look around, so that they let go of closed files and dropped memory.
    pub fn rouse(&self) {
        if self.is_here() {
            self.shared.wake(self.shared.queue.rouse());
        }
    }

    /// Whether this is the process that has the threads.
    fn is_here(&self) -> bool {
        self.shared.tracker.check_process().is_ok()
    }

    /// A descriptor that becomes readable whenever an operation ends, for event loops; one a loop, rung until dropped.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the process has no more descriptors, [`Error::Forked`].
    pub fn bell(&self) -> Result<Arc<EventFd>, Error> {
        self.shared.tracker.check_process()?;
        let bell = EventFd::new(true)
            .map_err(|error| Error::Unavailable(format!("an eventfd: {}", strerror(errno_of(&error)))))?;
        let bell = Arc::new(bell);
        self.shared.tracker.add_bell(&bell);
        Ok(bell)
    }

    /// Counts of now; in a forked child, which has none, zeros.
    pub fn stats(&self) -> Stats {
        if !self.is_here() {
            return Stats::default();
        }
        let counters = &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            operations: get(&counters.operations),
            in_flight: self.shared.tracker.in_flight() as u64,
            transfers: get(&counters.transfers),
            fixed_transfers: get(&counters.fixed),
            retries: get(&counters.retries),
            direct_bytes: get(&counters.direct_bytes),
            bounced_bytes: get(&counters.bounced_bytes),
            buffered_bytes: get(&counters.buffered_bytes),
            gpu_bytes: get(&counters.gpu_bytes),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
        if !self.is_here() {
            // A forked process has no such threads; the system would let go of others that it has by the same numbers.
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(threads));
        }
    }
}

/// What can be known before any byte moves.
fn check(request: &Request) -> Result<(), Error> {
    let (target, offset, len) = (&request.target, request.offset, request.buffer.len() as u64);
    if offset.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
        return Err(Error::Invalid(format!("{len} bytes at offset {offset} end past 2^63; files end before that")));
    }
    target.files().iter().try_for_each(|file| file.check_way(request.direction))?;
    if request.whole {
        fit(target, request.direction, len)?;
    }
    let size = |file: usize| target.files()[file].size();
    for (file, (from, part)) in target.ranges(offset, len).into_iter().enumerate() {
        if part == 0 {
            continue;
        }
        if request.direction == Direction::Write {
            target.files()[file].allocate(from, part)?;
        } else if size(file)? < from + part {
            let path = Arc::clone(target.files()[file].path());
            return Err(Error::UnexpectedEnd {
                place: crate::error::Place { path, offset: from, len: part },
                end: size(file)?,
            });
        }
    }
    Ok(())
}

/// Whole files: cut what is written, compare what is read.
fn fit(target: &Target, direction: Direction, len: u64) -> Result<(), Error> {
    for (file, (_, part)) in target.files().iter().zip(target.ranges(0, len)) {
        if direction == Direction::Write {
            file.cut(part)?;
        } else if file.size()? != part {
            return Err(Error::Invalid(format!(
                "{} has {} bytes and {part} were to be read, all that it has; read into memory of that size, or a part \
                 of the file (pread)",
                file.path().display(),
                file.size()?,
            )));
        }
    }
    Ok(())
}

/// An operation of no bytes still keeps its promise about the device.
fn finish_empty(op: &Op) {
    if op.durable {
        for file in op.target.files() {
            if let Err(errno) = sys::fdatasync(file.any_fd()) {
                op.fail(Error::os("sync", file.path(), 0, 0, errno));
            }
        }
    }
    op.part_over();
    op.finish();
}

/// The life of a worker's thread.
fn work<B: Backend>(
    shared: &Shared,
    worker: usize,
    habits: Habits,
    make: &Maker<B>,
    report: &mpsc::Sender<Result<(), i32>>,
) {
    let backend = match make(worker, Arc::clone(&shared.alarms[worker])) {
        Ok(backend) => backend,
        Err(error) => {
            let _ = report.send(Err(errno_of(&error)));
            return;
        }
    };
    let _ = report.send(Ok(()));
    let queue = Arc::clone(&shared.queue);
    let mut driver = Driver::new(backend, queue, worker, habits, Arc::clone(&shared.counters));
    let outcome = catch_unwind(AssertUnwindSafe(|| driver.run()));
    let why = match outcome {
        Ok(Ok(())) => return,
        Ok(Err(why)) => why,
        Err(panic) => panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("a panic")
            .to_owned(),
    };
    lock(&shared.died).get_or_insert(why.clone());
    shared.cancel(|_| Error::WorkerDied(why.clone()));
    driver.fail_all(&why);
}

#[cfg(test)]
#[cfg(feature = "loom")]
#[path = "model.rs"]
mod model;

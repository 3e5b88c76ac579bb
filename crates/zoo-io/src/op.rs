//! One operation: a buffer, a place, and what became of it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::checksum::Pieces;
use crate::error::{Direction, Error, Place};
use crate::file::Target;
use crate::gds::{Gpu, Route};
use crate::memory;
use crate::plan::{Chunk, Plan};
use crate::queue::Source;
use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, lock};
use crate::sys::EventFd;

/// Memory that an operation owns until it is over.
///
/// # Safety
/// `start()..start() + len()` stays mapped and where it is until the value is dropped, readable for a write, writable for a
/// read, and during a read nobody else touches it.
pub unsafe trait Buffer: Send {
    /// First byte. Asked for once, before the transfers, which write through this very pointer: it must be one that may
    /// be written through, and stay so while the value moves.
    fn start(&mut self) -> *mut u8;
    /// Length in bytes.
    fn len(&self) -> usize;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Which GPU's memory it is, for an engine of GPUDirect Storage; `None`: the host's.
    fn gpu(&self) -> Option<Gpu> {
        None
    }
}

// SAFETY: a vector's heap memory does not move with the vector, and whoever owns the vector owns the bytes.
unsafe impl Buffer for Vec<u8> {
    fn start(&mut self) -> *mut u8 {
        self.as_mut_ptr()
    }
    fn len(&self) -> usize {
        Vec::len(self)
    }
}

// SAFETY: a pool buffer does not move, and whoever owns it owns the bytes.
unsafe impl Buffer for crate::memory::PoolBuffer {
    fn start(&mut self) -> *mut u8 {
        crate::memory::PoolBuffer::start(self).as_ptr()
    }
    fn len(&self) -> usize {
        crate::memory::PoolBuffer::len(self)
    }
}

/// What an operation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// Bytes moved: all of the buffer.
    pub num_bytes: u64,
    /// CRC-32C of the buffer, when it was asked for.
    pub checksum: Option<u32>,
}

/// Operations of one engine that are not over, and what `wait` has yet to tell.
#[derive(Debug)]
pub(crate) struct Tracker {
    /// The process whose threads do the work. A forked child has copies of all of this and nobody who changes them: even
    /// a lock may be held for ever there, so it is told before it takes one.
    owner: u32,
    state: Mutex<Tally>,
    changed: Condvar,
    /// Rung at every completion, for event loops; gone when the loop drops its end.
    bells: Mutex<Vec<Weak<EventFd>>>,
}

#[derive(Debug, Default)]
struct Tally {
    in_flight: usize,
    finished: u64,
    failures: VecDeque<(u64, Error)>,
    forgotten: u64,
}

/// Failures nobody has asked about are kept up to this number; the rest is counted.
const KEPT_FAILURES: usize = 256;

/// What a wait for all operations saw.
#[derive(Debug, Default)]
pub struct Report {
    /// Operations that ended since the last time, failed ones included.
    pub finished: u64,
    /// Failures that no ticket has told yet, oldest first.
    pub failures: Vec<Error>,
    /// Further failures, of which only the number is known.
    pub forgotten: u64,
    /// Still running: not zero only when the time was over.
    pub in_flight: usize,
}

impl Default for Tracker {
    fn default() -> Self {
        Tracker { owner: std::process::id(), state: Mutex::default(), changed: Condvar::new(), bells: Mutex::default() }
    }
}

impl Tracker {
    /// An error in every process but the one that made it.
    pub(crate) fn check_process(&self) -> Result<(), Error> {
        let here = std::process::id();
        if here == self.owner { Ok(()) } else { Err(Error::Forked { owner: self.owner, here }) }
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        lock(&self.state)
    }

    pub(crate) fn begin(&self) {
        self.tally().in_flight += 1;
    }

    fn end(&self, id: u64, error: Option<&Error>) {
        let mut tally = self.tally();
        tally.in_flight -= 1;
        tally.finished += 1;
        if let Some(error) = error {
            if tally.failures.len() == KEPT_FAILURES {
                tally.failures.pop_front();
                tally.forgotten += 1;
            }
            tally.failures.push_back((id, error.clone()));
        }
        drop(tally);
        self.changed.notify_all();
        lock(&self.bells).iter().filter_map(Weak::upgrade).for_each(|bell| bell.wake());
    }

    /// Ring this one too from now on.
    pub(crate) fn add_bell(&self, bell: &Arc<EventFd>) {
        let mut bells = lock(&self.bells);
        bells.retain(|other| other.strong_count() > 0);
        bells.push(Arc::downgrade(bell));
    }

    fn told(&self, id: u64) {
        self.tally().failures.retain(|(other, _)| *other != id);
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.tally().in_flight
    }

    /// Wait until nothing is in flight or the time is over, and look at how it is then.
    fn settle(&self, timeout: Option<Duration>) -> MutexGuard<'_, Tally> {
        let deadline = timeout.map(|t| Instant::now() + t);
        let mut tally = self.tally();
        while tally.in_flight > 0 {
            let Some(left) = deadline.map(|d| d.saturating_duration_since(Instant::now())) else {
                tally = self.changed.wait(tally).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if left.is_zero() {
                break;
            }
            tally = self.changed.wait_timeout(tally, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        tally
    }

    /// Whether nothing is in flight, now or before the time is over.
    pub(crate) fn is_idle_within(&self, timeout: Duration) -> bool {
        self.settle(Some(timeout)).in_flight == 0
    }

    /// Wait until nothing is in flight or the time is over. A report is made only in the first case.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Report {
        let mut tally = self.settle(timeout);
        if tally.in_flight > 0 {
            return Report { in_flight: tally.in_flight, ..Report::default() };
        }
        Report {
            finished: std::mem::take(&mut tally.finished),
            failures: tally.failures.drain(..).map(|(_, error)| error).collect(),
            forgotten: std::mem::take(&mut tally.forgotten),
            in_flight: 0,
        }
    }
}

/// An operation on its way.
pub(crate) struct Op {
    pub(crate) id: u64,
    pub(crate) direction: Direction,
    /// How bytes travel, for memory of a GPU; dropped before the files, because cuFile forgets a file while it is open.
    pub(crate) route: Option<Route>,
    pub(crate) target: Target,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) start: *mut u8,
    /// Where the memory lies, if in memory of this crate.
    pub(crate) region: Option<memory::Home>,
    /// Sums of the pieces, when a checksum was asked for.
    pub(crate) sums: Option<Mutex<Pieces>>,
    pub(crate) expected: Option<u32>,
    /// The bytes are to be on the device, not only in its cache, when it is over.
    pub(crate) durable: bool,
    /// Chunks made and not over, plus one while the plan is not exhausted.
    pub(crate) pending: AtomicUsize,
    failed: AtomicBool,
    /// A worker died while the kernel had a part of it: nobody gets the memory any more.
    buried: AtomicBool,
    first_error: Mutex<Option<Error>>,
    buffer: Mutex<Option<Box<dyn Buffer>>>,
    result: Mutex<Option<Result<Done, Error>>>,
    over: Condvar,
    tracker: Arc<Tracker>,
}

// SAFETY: `start` points into `buffer`, which is Send and which the operation owns until it is over.
unsafe impl Send for Op {}
// SAFETY: workers touch disjoint bytes behind `start`; everything else is behind locks and atomics.
unsafe impl Sync for Op {}

impl Op {
    /// `start`: what the request's buffer said.
    pub(crate) fn new(
        id: u64,
        request: Request,
        start: *mut u8,
        route: Option<Route>,
        tracker: Arc<Tracker>,
    ) -> Arc<Op> {
        tracker.begin();
        let wants_sum = request.checksum || request.expected.is_some();
        Arc::new(Op {
            id,
            direction: request.direction,
            target: request.target,
            offset: request.offset,
            len: request.buffer.len() as u64,
            start,
            region: if route.is_some() { None } else { memory::find(start as usize, request.buffer.len()) },
            route,
            sums: wants_sum.then(Mutex::default),
            expected: request.expected,
            durable: request.durable,
            pending: AtomicUsize::new(1),
            failed: AtomicBool::new(false),
            buried: AtomicBool::new(false),
            first_error: Mutex::new(None),
            buffer: Mutex::new(Some(request.buffer)),
            result: Mutex::new(None),
            over: Condvar::new(),
            tracker,
        })
    }

    /// Whether a part of it failed already, so that the rest need not be begun.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Remember the first error.
    pub(crate) fn fail(&self, error: Error) {
        lock(&self.first_error).get_or_insert(error);
        self.failed.store(true, Ordering::Release);
    }

    /// Keep the memory for ever: the kernel may still read or write it, and nobody will learn when it has done so.
    pub(crate) fn bury(self: &Arc<Self>) {
        if !self.buried.swap(true, Ordering::AcqRel) {
            std::mem::forget(Arc::clone(self));
        }
    }

    /// One part is over; true for the last one.
    pub(crate) fn part_over(&self) -> bool {
        self.pending.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Where it is, for errors about all of it.
    pub(crate) fn place(&self) -> Place {
        let path = match self.target.files() {
            [file, ..] => Arc::clone(file.path()),
            [] => Arc::from(std::path::Path::new("")),
        };
        Place { path, offset: self.offset, len: self.len }
    }

    /// Everything was done or failed: set the result and tell everybody who waits.
    pub(crate) fn finish(&self) {
        let checksum = self.sums.as_ref().map(|sums| lock(sums).total());
        let mut error = lock(&self.first_error).take();
        if let (None, Some(expected), Some(found)) = (&error, self.expected, checksum)
            && expected != found
        {
            error = Some(Error::Checksum { place: self.place(), expected, found });
        }
        let result = error.clone().map_or(Ok(Done { num_bytes: self.len, checksum }), Err);
        // One step for everybody who looks: who sees the result finds it counted, and the other way round.
        let mut slot = lock(&self.result);
        *slot = Some(result);
        self.tracker.end(self.id, error.as_ref());
        drop(slot);
        self.over.notify_all();
    }
}

/// What to move where. The buffer goes in by value; [`Ticket::take_buffer`] gives it back.
pub struct Request {
    /// Which way.
    pub direction: Direction,
    /// File or files.
    pub target: Target,
    /// First byte in the target.
    pub offset: u64,
    /// The memory; all of it is moved.
    pub buffer: Box<dyn Buffer>,
    /// Whether to sum the bytes.
    pub checksum: bool,
    /// For a read: the sum the bytes must have.
    pub expected: Option<u32>,
    /// For a write: whether the bytes must be on the device at the end (`fdatasync`).
    pub durable: bool,
    /// Whether its transfers begin before those of all operations that are not urgent.
    pub urgent: bool,
    /// The target holds these bytes and no others: a longer one is cut before it is written, one of another size is not
    /// read. The offset is 0.
    pub whole: bool,
}

/// The caller's end of an operation. Dropping it neither stops the operation nor frees its memory early; a failure is
/// then told by the next wait of the engine.
#[derive(Clone)]
pub struct Ticket(pub(crate) Arc<Op>);

impl Ticket {
    /// Whether it is over; in a forked child, where it never will be, waiting says so at once.
    pub fn is_done(&self) -> bool {
        self.0.tracker.check_process().is_err() || lock(&self.0.result).is_some()
    }

    /// Wait until it is over; `None` when the time was over first.
    ///
    /// # Errors
    /// Whatever went wrong; the engine's next wait does not tell it again. [`Error::Forked`] in a forked child.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Result<Done, Error>> {
        if let Err(error) = self.0.tracker.check_process() {
            return Some(Err(error));
        }
        let deadline = timeout.map(|t| Instant::now() + t);
        let mut result = lock(&self.0.result);
        while result.is_none() {
            let Some(left) = deadline.map(|d| d.saturating_duration_since(Instant::now())) else {
                result = self.0.over.wait(result).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if left.is_zero() {
                return None;
            }
            result = self.0.over.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if matches!(*result, Some(Err(_))) {
            self.0.tracker.told(self.0.id);
        }
        result.clone()
    }

    /// The buffer of an operation that is over; the second call gets none, and neither does anybody after
    /// [`Error::WorkerDied`] where the kernel may still have the memory, which is then never freed.
    pub fn take_buffer(&self) -> Option<Box<dyn Buffer>> {
        let here = self.0.tracker.check_process().is_ok();
        let ours = here && self.is_done() && !self.0.buried.load(Ordering::Acquire);
        if ours { lock(&self.0.buffer).take() } else { None }
    }
}

/// An operation in the queue: chunks come out of it one by one.
pub(crate) struct Pending {
    pub(crate) op: Arc<Op>,
    pub(crate) plan: Plan,
}

impl Source for Pending {
    type Item = (Arc<Op>, Chunk);

    fn take(&mut self) -> Option<(Self::Item, bool)> {
        let chunk = self.plan.next()?;
        let last = self.plan.is_done();
        // The plan itself counts as one part; its last chunk takes over that count.
        if !last {
            self.op.pending.fetch_add(1, Ordering::AcqRel);
        }
        Some(((Arc::clone(&self.op), chunk), last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Under Miri this is a question of aliasing; elsewhere of bytes.
    #[test]
    fn bytes_written_behind_a_vectors_back_are_its_bytes() {
        let mut buffer: Box<dyn Buffer> = Box::new(vec![1_u8; 3]);
        let start = buffer.start();
        let moved = vec![buffer];
        // SAFETY: three bytes of the vector, which nobody else touches.
        unsafe { std::ptr::copy_nonoverlapping([7_u8, 8, 9].as_ptr(), start, 3) };
        let mut back = moved.into_iter().next().unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { std::slice::from_raw_parts(back.start(), back.len()) }, [7, 8, 9]);
    }
}

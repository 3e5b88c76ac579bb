//! The loop of one worker: take chunks, begin transfers, finish them, until the queue is closed and empty.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{Backend, Event, Kind, Transfer, Wait};
use crate::bounce::Slots;
use crate::checksum::crc32c;
use crate::copy::copy_streaming;
use crate::error::{Direction, Error, Place};
use crate::gds;
use crate::op::{Op, Pending};
use crate::plan::{Chunk, Way};
use crate::queue::{Queue, Taken};
use crate::sync::lock;

/// A transfer that moved nothing is begun again so often; then the file has ended, or the device is broken.
const ATTEMPTS: u32 = 8;
/// The kernel may ask to come again any number of times under memory pressure, but not for ever.
const BUSY_ATTEMPTS: u32 = 10_000;
/// Direct transfers are continued at multiples of this; short ones end there but at the end of a file.
const PAGE: usize = 4096;

/// Counts since the engine was made.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) operations: AtomicU64,
    pub(crate) transfers: AtomicU64,
    pub(crate) fixed: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) direct_bytes: AtomicU64,
    pub(crate) bounced_bytes: AtomicU64,
    pub(crate) buffered_bytes: AtomicU64,
    pub(crate) gpu_bytes: AtomicU64,
    /// What the workers decided against the first choice, in sentences.
    pub(crate) notices: Mutex<Vec<String>>,
}

impl Counters {
    fn moved(&self, way: Way, len: usize) {
        let counter = match way {
            Way::Direct => &self.direct_bytes,
            Way::Bounce => &self.bounced_bytes,
            Way::Buffered => &self.buffered_bytes,
            Way::Gpu => &self.gpu_bytes,
        };
        counter.fetch_add(len as u64, Ordering::Relaxed);
    }
}

/// How a worker behaves.
#[derive(Debug, Clone)]
pub(crate) struct Habits {
    /// Largest window of a transfer, in bytes.
    pub(crate) block: usize,
    /// Bytes of bounce buffers.
    pub(crate) bounce: usize,
    /// Hand every transfer to the kernel by itself.
    pub(crate) single_submit: bool,
    /// Begin new transfers while others are in flight, instead of one full queue after the other.
    pub(crate) overlap: bool,
}

impl Habits {
    /// Size of a bounce buffer: room for a window, whatever the device wants of addresses.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.block.max(1 << 16).next_multiple_of(PAGE)
    }

    /// How many bounce buffers a worker with so many transfers in flight makes.
    pub(crate) fn slots(&self, depth: usize) -> usize {
        (self.bounce / self.slot_bytes()).clamp(2, 4096).min(depth.max(1))
    }
}

enum Task {
    Move(Chunk),
    /// Bring file number `k` of the target onto the device.
    Sync(usize),
}

struct Job {
    op: Arc<Op>,
    task: Task,
    slot: Option<usize>,
    /// Bytes of the window that were moved.
    done: usize,
    attempts: u32,
    /// It was counted as over.
    ended: bool,
}

impl Job {
    fn new(op: Arc<Op>, task: Task) -> Self {
        Job { op, task, slot: None, done: 0, attempts: 0, ended: false }
    }

    /// Count it as over; true for the last part of its operation.
    fn end(&mut self) -> bool {
        self.ended = true;
        self.op.part_over()
    }
}

impl Drop for Job {
    /// A panic unwinds past a job that the worker has in its hand: its operation ends all the same.
    fn drop(&mut self) {
        if !self.ended {
            self.op.fail(Error::WorkerDied("a panic".to_owned()));
            if self.end() {
                self.op.finish();
            }
        }
    }
}

pub(crate) struct Driver<B> {
    backend: B,
    queue: Arc<Queue<Pending>>,
    worker: usize,
    habits: Habits,
    jobs: Vec<Option<Job>>,
    vacant: Vec<u32>,
    /// Begun or taken from the queue, waiting for room.
    ready: Vec<Job>,
    slots: Option<Slots>,
    counters: Arc<Counters>,
    fixed_told: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Fill {
    /// There is nothing more to take, and the worker is marked asleep.
    Asleep,
    /// There may be more, but no room.
    Full,
    /// There will never be more.
    Closed,
}

impl<B: Backend> Driver<B> {
    pub(crate) fn new(
        backend: B,
        queue: Arc<Queue<Pending>>,
        worker: usize,
        habits: Habits,
        counters: Arc<Counters>,
    ) -> Self {
        let depth = backend.depth();
        let vacant = (0..u32::try_from(depth).unwrap_or(u32::MAX)).rev().collect();
        Driver {
            backend,
            queue,
            worker,
            habits,
            jobs: (0..depth).map(|_| None).collect(),
            vacant,
            ready: Vec::new(),
            slots: None,
            counters,
            fixed_told: 0,
        }
    }

    fn in_flight(&self) -> usize {
        self.jobs.len() - self.vacant.len()
    }

    /// Work until the queue is closed and everything is over.
    ///
    /// # Errors
    /// The backend's sentence; [`Driver::fail_all`] must follow.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        let mut events = Vec::new();
        loop {
            let fill = self.fill(&mut events)?;
            let in_flight = self.in_flight();
            if in_flight == 0 && self.ready.is_empty() && events.is_empty() {
                match fill {
                    Fill::Closed => return Ok(()),
                    Fill::Full => continue,
                    Fill::Asleep => {}
                }
            }
            if events.is_empty() {
                self.backend.turn(Wait::Yes, in_flight, &mut events)?;
            }
            self.complete_all(&mut events)?;
            let fixed = self.backend.fixed();
            self.counters.fixed.fetch_add(fixed - self.fixed_told, Ordering::Relaxed);
            self.fixed_told = fixed;
            if let Some(notice) = self.backend.notice() {
                self.counters.notices.lock().unwrap_or_else(PoisonError::into_inner).push(notice);
            }
        }
    }

    /// Finish what the kernel has done. After a copy the next transfer is handed over at once, because the device would
    /// otherwise wait for the copies of all others.
    fn complete_all(&mut self, events: &mut Vec<Event>) -> Result<(), String> {
        let mut later = Vec::new();
        for event in events.drain(..) {
            if self.complete(event) && self.habits.overlap {
                self.fill(&mut later)?;
                self.backend.turn(Wait::No, self.in_flight(), &mut later)?;
            }
        }
        events.append(&mut later);
        Ok(())
    }

    fn fill(&mut self, events: &mut Vec<Event>) -> Result<Fill, String> {
        if !self.habits.overlap && self.in_flight() > 0 {
            return Ok(Fill::Full);
        }
        while !self.vacant.is_empty() {
            let job = match self.ready.pop() {
                Some(job) => job,
                None => match self.queue.take_or_sleep(self.worker) {
                    Taken::Item((op, chunk)) => Job::new(op, Task::Move(chunk)),
                    Taken::Asleep => return Ok(Fill::Asleep),
                    Taken::Closed => return Ok(Fill::Closed),
                },
            };
            let copies = matches!(&job.task, Task::Move(chunk) if chunk.way == Way::Bounce);
            if let Some(job) = self.begin(job) {
                // No bounce buffer is free; one will be when a transfer that has it is over.
                self.ready.push(job);
                break;
            }
            // A copy takes as long as many system calls: what is copied goes at once.
            if self.habits.single_submit || copies {
                self.backend.turn(Wait::No, self.in_flight(), events)?;
            }
        }
        Ok(Fill::Full)
    }

    /// Start a job from its beginning; gives it back when it needs a bounce buffer and none is free.
    fn begin(&mut self, mut job: Job) -> Option<Job> {
        if job.op.has_failed() {
            self.over(job);
            return None;
        }
        if let Task::Move(chunk) = &job.task {
            if chunk.way == Way::Bounce && job.slot.is_none() {
                match self.slot() {
                    Ok(Some(slot)) => job.slot = Some(slot),
                    Ok(None) => return Some(job),
                    Err(error) => {
                        job.op.fail(error);
                        self.over(job);
                        return None;
                    }
                }
            }
            if job.op.direction == Direction::Write && job.attempts == 0 && job.done == 0 {
                self.collect_payload(&job, *chunk);
            }
        }
        self.start(job);
        None
    }

    /// A free bounce buffer; the first call makes them.
    fn slot(&mut self) -> Result<Option<usize>, Error> {
        if self.slots.is_none() {
            self.slots = Some(Slots::new(self.habits.slot_bytes(), self.habits.slots(self.jobs.len()))?);
        }
        Ok(self.slots.as_mut().and_then(|slots| slots.free.pop()))
    }

    fn slot_start(&self, slot: usize) -> *mut u8 {
        match &self.slots {
            // SAFETY: slot numbers are below the count the region was made for.
            Some(slots) => unsafe { slots.region.start().as_ptr().add(slot * slots.size) },
            None => std::ptr::null_mut(),
        }
    }

    /// Before a write: sum the payload, and bring it to the bounce buffer.
    fn collect_payload(&self, job: &Job, chunk: Chunk) {
        // SAFETY: chunks lie inside the operation's buffer.
        let source = unsafe { job.op.start.add(chunk.memory) };
        // Before the copy: it then finds the payload in the cache, where it leaves nothing itself.
        self.sum(job, chunk, source);
        if let Some(slot) = job.slot {
            // SAFETY: a slot holds a window, and a bounced write's window is its payload; the two do not overlap.
            unsafe { copy_streaming(source, self.slot_start(slot), chunk.len) };
        }
    }

    fn sum(&self, job: &Job, chunk: Chunk, payload: *const u8) {
        if let Some(sums) = &job.op.sums {
            // SAFETY: the payload is readable; the caller of the operation does not write to it meanwhile.
            let sum = crc32c(unsafe { std::slice::from_raw_parts(payload, chunk.len) });
            lock(sums).add(chunk.memory, chunk.len, sum);
        }
    }

    /// Hand the rest of a job to the backend.
    fn start(&mut self, job: Job) {
        let Some(token) = self.vacant.pop() else {
            self.ready.push(job);
            return;
        };
        let transfer = match &job.task {
            Task::Sync(file) => {
                let fd = job.op.target.files()[*file].any_fd();
                let ptr = std::ptr::null_mut();
                let (kind, kept_file) = (Kind::Sync, None);
                Ok(Transfer {
                    token,
                    kind,
                    fd,
                    kept_file,
                    direct: false,
                    offset: 0,
                    ptr,
                    len: 0,
                    region: None,
                    route: None,
                })
            }
            Task::Move(chunk) => self.transfer(token, &job, chunk),
        };
        match transfer {
            Ok(transfer) => {
                self.counters.transfers.fetch_add(1, Ordering::Relaxed);
                self.jobs[token as usize] = Some(job);
                self.backend.push(transfer);
            }
            Err(error) => {
                self.vacant.push(token);
                job.op.fail(error);
                self.over(job);
            }
        }
    }

    fn transfer(&self, token: u32, job: &Job, chunk: &Chunk) -> Result<Transfer, Error> {
        let file = &job.op.target.files()[chunk.file];
        let (from, window) = chunk.window;
        let (direct, base, region) = match (chunk.way, job.slot) {
            (Way::Bounce, Some(slot)) => {
                let region = self.slots.as_ref().map(|slots| slots.region.describe());
                (true, self.slot_start(slot), region)
            }
            // SAFETY: chunks lie inside the operation's buffer.
            (way, _) => (way == Way::Direct, unsafe { job.op.start.add(chunk.memory) }, job.op.region),
        };
        let fd = match (direct, file.direct_fd()) {
            (true, Some(fd)) => fd,
            _ if job.op.route.is_some() => file.any_fd(),
            _ => file.buffered_fd()?,
        };
        Ok(Transfer {
            token,
            kind: if job.op.direction == Direction::Read { Kind::Read } else { Kind::Write },
            fd,
            kept_file: file.kept().then(|| file.id()),
            direct,
            offset: from + job.done as u64,
            // SAFETY: less than the window is done, and the window lies inside the slot or the buffer.
            ptr: unsafe { base.add(job.done) },
            len: window - job.done,
            region,
            route: job.op.route.as_ref().map(|route| (NonNull::from(route), chunk.file)),
        })
    }

    /// True when a bounce buffer was emptied or will be filled again.
    fn complete(&mut self, event: Event) -> bool {
        let Some(mut job) = self.jobs.get_mut(event.token as usize).and_then(Option::take) else {
            return false;
        };
        let bounced = job.slot.is_some();
        self.vacant.push(event.token);
        let again = match event.result {
            Err(libc::EINTR | libc::EAGAIN) if job.attempts < BUSY_ATTEMPTS => {
                job.attempts += 1;
                true
            }
            Err(errno) => {
                job.fail(errno);
                false
            }
            Ok(moved) => self.advance(&mut job, moved),
        };
        if again && !job.op.has_failed() {
            self.counters.retries.fetch_add(1, Ordering::Relaxed);
            self.start(job);
        } else {
            self.over(job);
        }
        bounced
    }

    /// Count what was moved; true when the rest must be begun again.
    fn advance(&self, job: &mut Job, moved: usize) -> bool {
        let Task::Move(chunk) = job.task else {
            return false;
        };
        let (from, window) = chunk.window;
        let total = job.done + moved;
        let head = (chunk.offset - from) as usize;
        let needed = if job.op.direction == Direction::Read { head + chunk.len } else { window };
        if total >= needed {
            if job.op.direction == Direction::Read {
                self.deliver(job, chunk, head);
            }
            self.counters.moved(chunk.way, chunk.len);
            return false;
        }
        let whole = if matches!(chunk.way, Way::Buffered | Way::Gpu) { total } else { total / PAGE * PAGE };
        if whole > job.done {
            (job.done, job.attempts) = (whole, 0);
            return true;
        }
        job.attempts += 1;
        let ended = moved == 0 && job.op.direction == Direction::Read;
        if ended || job.attempts >= ATTEMPTS {
            job.stuck(chunk, from + total as u64, total as u64);
            return false;
        }
        true
    }

    /// After a read: sum the payload, and bring it from the bounce buffer to where it belongs.
    fn deliver(&self, job: &Job, chunk: Chunk, head: usize) {
        // SAFETY: chunks lie inside the operation's buffer.
        let sink = unsafe { job.op.start.add(chunk.memory) };
        let Some(slot) = job.slot else {
            self.sum(job, chunk, sink);
            return;
        };
        // SAFETY: the window lies inside the slot, the payload inside the window.
        let source = unsafe { self.slot_start(slot).add(head) };
        self.sum(job, chunk, source);
        // SAFETY: both ranges are valid for the payload and do not overlap.
        unsafe { copy_streaming(source, sink, chunk.len) };
    }

    /// A part of an operation is over, well or badly.
    fn over(&mut self, mut job: Job) {
        if let (Some(slot), Some(slots)) = (job.slot.take(), self.slots.as_mut()) {
            slots.free.push(slot);
        }
        if !job.end() {
            return;
        }
        let op = &job.op;
        if op.durable && !op.has_failed() && matches!(job.task, Task::Move(_)) {
            let files = op.target.files().len();
            op.pending.store(files, Ordering::Release);
            self.ready.extend((0..files).map(|k| Job::new(Arc::clone(op), Task::Sync(k))));
            return;
        }
        op.finish();
    }

    /// The worker cannot go on: fail everything it had, and keep alive for ever whatever the kernel may still write to.
    pub(crate) fn fail_all(&mut self, why: &str) {
        std::mem::forget(self.slots.take());
        let begun: Vec<Job> = self.jobs.iter_mut().filter_map(Option::take).collect();
        // Before any of them ends: what waits for an operation must find it buried.
        begun.iter().for_each(|job| job.op.bury());
        for mut job in begun.into_iter().chain(self.ready.drain(..)) {
            job.op.fail(Error::WorkerDied(why.to_owned()));
            if job.end() {
                job.op.finish();
            }
        }
    }
}

impl Job {
    fn fail(&self, errno: i32) {
        let (what, file, offset, len) = match &self.task {
            Task::Sync(file) => ("sync", *file, 0, 0),
            Task::Move(chunk) => (
                if self.op.direction == Direction::Read { "read" } else { "write" },
                chunk.file,
                chunk.offset,
                chunk.len,
            ),
        };
        let path = self.op.target.files()[file].path();
        let place = Place { path: Arc::clone(path), offset, len: len as u64 };
        self.op.fail(if gds::is_code(errno) {
            Error::Gpu { what, place, why: gds::words(errno) }
        } else {
            Error::Os { what, place, errno }
        });
    }

    fn stuck(&self, chunk: Chunk, end: u64, done: u64) {
        let file = &self.op.target.files()[chunk.file];
        let place = Place { path: Arc::clone(file.path()), offset: chunk.offset, len: chunk.len as u64 };
        // The file may end long before what this transfer saw.
        let end = file.size().map_or(end, |size| size.min(end));
        self.op.fail(match self.op.direction {
            Direction::Read => Error::UnexpectedEnd { place, end },
            Direction::Write => Error::NoProgress { place, done, attempts: self.attempts },
        });
    }
}

//! io_uring (Axboe 2019): one ring a worker, kept full; the kernel does the rest.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};

use super::{Backend, Event, Kind, Transfer, Wait};
use crate::error::{errno_of, strerror};
use crate::memory::{HUGE_PAGE, Home, Mapping};
use crate::sync::Alarm;
use crate::{file, memory};

/// Marks the event of the alarm, which is no transfer.
const ALARM: u64 = u64::MAX;
/// Slots for files and for pieces of memory; what finds none goes unregistered.
const SLOTS: u32 = 64;
const PIECES: u32 = 1024;
/// The kernel registers at most this much memory in one slot.
const LARGEST_PIECE: usize = 1 << 30;

/// Settings of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingOptions {
    /// A kernel thread looks for submissions, so that none needs a system call; sleeps after this many milliseconds.
    pub sqpoll_idle_ms: Option<u32>,
    /// Completions are polled for instead of announced by interrupts; direct transfers on polled queues only.
    pub iopoll: bool,
}

/// Names registered in a ring's table of files or of memory; slot `k` holds `names[k]`.
#[derive(Default)]
struct Table<K> {
    names: Vec<Option<K>>,
}

impl<K: PartialEq + Copy> Table<K> {
    fn find(&self, name: K) -> Option<u32> {
        self.names.iter().position(|slot| *slot == Some(name)).and_then(|k| u32::try_from(k).ok())
    }

    fn vacant(&self) -> Option<u32> {
        self.names.iter().position(Option::is_none).and_then(|k| u32::try_from(k).ok())
    }
}

/// A part of a region that the kernel has pinned in one slot: bytes `from..to` of it.
struct Piece {
    id: u64,
    from: usize,
    to: usize,
    /// Mapped until the kernel has let go of it.
    _mapping: Arc<Mapping>,
}

pub(crate) struct Uring {
    ring: IoUring,
    depth: usize,
    iopoll: bool,
    alarm: Arc<Alarm>,
    alarm_count: Box<[u8; 8]>,
    alarm_armed: bool,
    files: Table<u64>,
    pieces: Vec<Option<Piece>>,
    /// How many the kernel has slots for.
    most_pieces: usize,
    closed_files: u64,
    dropped_regions: u64,
    /// The kernel refused to register memory; not asked again until some is dropped.
    refused: bool,
    notice: Option<String>,
    /// The kernel takes nothing any more; why.
    broken: Option<String>,
    /// Done at once, because a polled ring takes direct transfers only.
    done: Vec<Event>,
    fixed: u64,
}

/// The entry of a transfer; a macro because the two kinds of descriptor have no common public trait.
macro_rules! entry {
    ($fd:expr, $transfer:expr, $piece:expr) => {{
        let Transfer { kind, offset, ptr, len, .. } = *$transfer;
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        match (kind, $piece) {
            (Kind::Read, Some(piece)) => opcode::ReadFixed::new($fd, ptr, len, piece).offset(offset).build(),
            (Kind::Read, None) => opcode::Read::new($fd, ptr, len).offset(offset).build(),
            (Kind::Write, Some(piece)) => opcode::WriteFixed::new($fd, ptr, len, piece).offset(offset).build(),
            (Kind::Write, None) => opcode::Write::new($fd, ptr, len).offset(offset).build(),
            (Kind::Sync, _) => opcode::Fsync::new($fd).flags(types::FsyncFlags::DATASYNC).build(),
        }
    }};
}

impl Uring {
    /// A ring for `depth` transfers on this thread.
    ///
    /// # Errors
    /// The kernel's: `EPERM` (forbidden), `ENOSYS` (too old or compiled out), `ENOMEM` (locked memory).
    pub(crate) fn new(depth: usize, options: RingOptions, alarm: Arc<Alarm>) -> io::Result<Self> {
        let entries = u32::try_from(depth + 1).unwrap_or(4096).next_power_of_two();
        let ring = build(entries, options)?;
        let kept = |wanted: io::Result<()>, slots: u32| if wanted.is_ok() { slots as usize } else { 0 };
        let files = Table { names: vec![None; kept(ring.submitter().register_files_sparse(SLOTS), SLOTS)] };
        let most_pieces = kept(ring.submitter().register_buffers_sparse(PIECES), PIECES);
        Ok(Uring {
            ring,
            depth,
            iopoll: options.iopoll,
            alarm,
            alarm_count: Box::new([0; 8]),
            alarm_armed: false,
            files,
            pieces: Vec::new(),
            most_pieces,
            closed_files: file::closed_so_far(),
            dropped_regions: memory::dropped_so_far(),
            refused: false,
            notice: None,
            broken: None,
            done: Vec::new(),
            fixed: 0,
        })
    }

    fn file(&mut self, name: u64, fd: RawFd) -> Option<u32> {
        if let Some(slot) = self.files.find(name) {
            return Some(slot);
        }
        let slot = self.files.vacant()?;
        self.ring.submitter().register_files_update(slot, &[fd]).ok()?;
        self.files.names[slot as usize] = Some(name);
        Some(slot)
    }

    /// Slot of a piece of memory that the transfer lies in.
    fn piece(&mut self, transfer: &Transfer) -> Option<u16> {
        let home = transfer.region?;
        let at = transfer.ptr as usize - home.start;
        let end = at + transfer.len;
        let holds = |piece: &Piece| piece.id == home.id && piece.from <= at && end <= piece.to;
        if let Some(slot) = self.pieces.iter().position(|slot| slot.as_ref().is_some_and(holds)) {
            return u16::try_from(slot).ok();
        }
        let (from, to) = surroundings(&home, at);
        if self.refused || end > to {
            return None;
        }
        let slot = match self.pieces.iter().position(Option::is_none) {
            Some(slot) => slot,
            None if self.pieces.len() < self.most_pieces => {
                self.pieces.push(None);
                self.pieces.len() - 1
            }
            None => return None,
        };
        let mapping = memory::pin(&home, &self.alarm)?;
        let memory = libc::iovec { iov_base: (home.start + from) as *mut _, iov_len: to - from };
        // SAFETY: the memory is mapped, and stays so while the piece is in the table.
        match unsafe { self.ring.submitter().register_buffers_update(slot as u32, &[memory], None) } {
            Ok(()) => {
                self.pieces[slot] = Some(Piece { id: home.id, from, to, _mapping: mapping });
                u16::try_from(slot).ok()
            }
            Err(error) => {
                self.refused = true;
                self.notice = Some(format!(
                    "{} bytes of memory could not be registered with the ring ({}), so the kernel pins pages for every \
                     transfer; a larger limit of locked memory (ulimit -l) helps",
                    memory.iov_len,
                    strerror(errno_of(&error))
                ));
                None
            }
        }
    }

    /// Let go of files that were closed and regions that were dropped.
    fn forget(&mut self) {
        let closed = file::closed_so_far();
        if closed != self.closed_files && self.hand_over() {
            self.closed_files = closed;
            // Registering a kept file anew costs a microsecond; which one was closed is not worth knowing.
            for slot in 0..self.files.names.len() {
                if self.files.names[slot].take().is_some() {
                    let _ = self.ring.submitter().register_files_update(slot as u32, &[-1]);
                }
            }
        }
        let dropped = memory::dropped_so_far();
        if dropped != self.dropped_regions {
            self.dropped_regions = dropped;
            for slot in 0..self.pieces.len() {
                if self.pieces[slot].as_ref().is_some_and(|piece| !memory::is_live(piece.id)) {
                    let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
                    // SAFETY: an empty slot points to nothing.
                    let _ = unsafe { self.ring.submitter().register_buffers_update(slot as u32, &[nothing], None) };
                    self.pieces[slot] = None;
                    self.refused = false;
                }
            }
        }
    }

    /// Let the kernel take all entries, which name files by their slots; whether it did.
    fn hand_over(&mut self) -> bool {
        while !self.ring.submission().is_empty() {
            if !matches!(self.ring.submit(), Ok(taken) if taken > 0) {
                return false;
            }
        }
        true
    }

    fn entry(&mut self, transfer: &Transfer) -> squeue::Entry {
        // A kept file has two descriptors; only the direct one is registered.
        let slot = transfer.kept_file.filter(|_| transfer.direct).and_then(|name| self.file(name, transfer.fd));
        let piece = if transfer.direct && transfer.len > 0 { self.piece(transfer) } else { None };
        self.fixed += u64::from(piece.is_some());
        match slot {
            Some(slot) => entry!(types::Fixed(slot), transfer, piece),
            None => entry!(types::Fd(transfer.fd), transfer, piece),
        }
        .user_data(transfer.token.into())
    }

    fn enqueue(&mut self, entry: &squeue::Entry) {
        // SAFETY: memory and descriptors of an entry stay valid until its event was seen; that is the contract of
        // `push`, and the alarm's counter lives as long as the ring.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // Full although there is an entry for every transfer: the kernel has not taken the last ones yet.
            match self.ring.submit().as_ref().map_err(errno_of) {
                Ok(_) => {}
                Err(errno) if is_passing(errno) => std::thread::yield_now(),
                Err(errno) => {
                    // The next turn says so; nobody is to wait for the event of this one.
                    self.broken = Some(refusal(errno));
                    return;
                }
            }
        }
    }

    fn collect(&mut self, events: &mut Vec<Event>) {
        let mut rung = false;
        events.append(&mut self.done);
        for completion in self.ring.completion() {
            if completion.user_data() == ALARM {
                rung = true;
                continue;
            }
            let result = completion.result();
            events.push(Event {
                token: completion.user_data() as u32,
                result: usize::try_from(result).map_err(|_| -result),
            });
        }
        self.alarm_armed &= !rung;
    }

    /// Sleep in the kernel until one completion, which may be the alarm's, is there.
    fn sleep(&mut self, in_flight: usize) -> io::Result<()> {
        if self.iopoll {
            // Polled rings take no other reads; nothing but transfers can be waited for.
            if in_flight == 0 {
                self.alarm.sleep();
                return Ok(());
            }
        } else if !self.alarm_armed {
            let fd = types::Fd(self.alarm.as_raw_fd());
            let read = opcode::Read::new(fd, self.alarm_count.as_mut_ptr(), 8).build().user_data(ALARM);
            self.enqueue(&read);
            self.alarm_armed = true;
        }
        self.ring.submit_and_wait(1).map(drop)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // Closing a ring lets go of memory some time later; this does so now.
        if !self.pieces.is_empty() {
            let _ = self.ring.submitter().unregister_buffers();
        }
        // The kernel may still hold the address of the alarm's counter: let it finish first.
        let mut events = Vec::new();
        for _ in 0..1000 {
            if !self.alarm_armed {
                return;
            }
            self.alarm.wake();
            let _ = self.ring.submit_and_wait(1);
            self.collect(&mut events);
        }
        // Never seen; a leaked word is better than a word the kernel writes after it was freed.
        std::mem::forget(std::mem::take(&mut self.alarm_count));
    }
}

/// What to register for a transfer at offset `at` of a region: what its operation uses, in whole huge pages, because
/// registering touches every page; and no more than fits a slot.
fn surroundings(home: &Home, at: usize) -> (usize, usize) {
    let first = home.used.0 / HUGE_PAGE * HUGE_PAGE;
    let from = first + at.saturating_sub(first) / LARGEST_PIECE * LARGEST_PIECE;
    (from, home.used.1.next_multiple_of(HUGE_PAGE).min(home.len).min(from + LARGEST_PIECE))
}

/// Interrupted, or the kernel wants completions taken first.
fn is_passing(errno: i32) -> bool {
    matches!(errno, libc::EINTR | libc::EBUSY | libc::EAGAIN)
}

fn refusal(errno: i32) -> String {
    format!("io_uring_enter: {} (errno {errno})", strerror(errno))
}

fn build(entries: u32, options: RingOptions) -> io::Result<IoUring> {
    let base = || {
        let mut builder = IoUring::builder();
        builder.dontfork();
        if let Some(idle) = options.sqpoll_idle_ms {
            builder.setup_sqpoll(idle);
        }
        if options.iopoll {
            builder.setup_iopoll();
        }
        builder
    };
    // One thread submits and completions are run when it asks: fewer interruptions (Linux 6.1). Older kernels say EINVAL.
    let mut modern = base();
    modern.setup_single_issuer();
    if options.sqpoll_idle_ms.is_none() {
        modern.setup_defer_taskrun();
    }
    match modern.build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => base().build(entries),
        result => result,
    }
}

impl Backend for Uring {
    fn depth(&self) -> usize {
        self.depth
    }

    fn push(&mut self, transfer: Transfer) {
        if self.iopoll && (!transfer.direct || transfer.kind == Kind::Sync) {
            self.done.push(Event { token: transfer.token, result: transfer.run() });
            return;
        }
        self.forget();
        let entry = self.entry(&transfer);
        self.enqueue(&entry);
    }

    fn turn(&mut self, wait: Wait, in_flight: usize, events: &mut Vec<Event>) -> Result<(), String> {
        self.forget();
        if let Some(why) = self.broken.take() {
            return Err(why);
        }
        let result = if wait == Wait::Yes && self.done.is_empty() && self.ring.completion().is_empty() {
            self.sleep(in_flight)
        } else {
            self.ring.submit().map(drop)
        };
        match result.as_ref().map_err(errno_of) {
            Ok(()) => {}
            Err(errno) if is_passing(errno) => {}
            Err(errno) => return Err(refusal(errno)),
        }
        self.collect(events);
        Ok(())
    }

    fn fixed(&self) -> u64 {
        self.fixed
    }

    fn notice(&mut self) -> Option<String> {
        self.notice.take()
    }
}

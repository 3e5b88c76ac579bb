//! What carries transfers to the kernel: one backend a file, one trait for all.

pub(crate) mod mock;
pub(crate) mod threads;
pub(crate) mod uring;

use std::os::fd::RawFd;
use std::ptr::NonNull;

use crate::gds::Route;
use crate::memory::Home;
use crate::sys;

/// What a transfer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// `fdatasync`.
    Sync,
}

/// One system call's worth of work. The memory stays valid until its event was seen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    /// Comes back in the event.
    pub(crate) token: u32,
    pub(crate) kind: Kind,
    pub(crate) fd: RawFd,
    /// Name of a file that many operations use.
    pub(crate) kept_file: Option<u64>,
    /// Past the page cache.
    pub(crate) direct: bool,
    pub(crate) offset: u64,
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    /// Region the memory lies in, and what the operation uses of it.
    pub(crate) region: Option<Home>,
    /// For memory of a GPU: the operation's, which lives until the event was seen, and the number of the file.
    pub(crate) route: Option<(NonNull<Route>, usize)>,
}

impl Transfer {
    /// Do it now, on this thread.
    pub(crate) fn run(&self) -> Result<usize, i32> {
        if let (Some((route, file)), Kind::Read | Kind::Write) = (self.route, self.kind) {
            // SAFETY: route and memory are valid until the event was seen, and nobody else reads or writes the memory.
            return unsafe { route.as_ref().run(file, self.kind == Kind::Write, self.ptr, self.len, self.offset) };
        }
        match self.kind {
            // SAFETY: the memory is valid until the event was seen, and nobody else reads or writes it.
            Kind::Read => unsafe { sys::pread(self.fd, self.ptr, self.len, self.offset) },
            // SAFETY: as above.
            Kind::Write => unsafe { sys::pwrite(self.fd, self.ptr, self.len, self.offset) },
            Kind::Sync => sys::fdatasync(self.fd),
        }
    }
}

/// A transfer is over: bytes moved, or the kernel's errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) token: u32,
    pub(crate) result: Result<usize, i32>,
}

/// Whether a turn may sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Look and come back.
    No,
    /// Until an event is there or a caller rings the worker's alarm.
    Yes,
}

/// Lives on one worker's thread. Every pushed transfer yields exactly one event.
pub(crate) trait Backend {
    /// Transfers it can have at once.
    fn depth(&self) -> usize;

    /// Take a transfer; at most `depth` may be without their event.
    fn push(&mut self, transfer: Transfer);

    /// Hand over what was pushed, and collect events. `in_flight` transfers are without their event.
    ///
    /// # Errors
    /// The sentence that says why the backend cannot go on at all.
    fn turn(&mut self, wait: Wait, in_flight: usize, events: &mut Vec<Event>) -> Result<(), String>;

    /// Transfers that went with registered memory so far.
    fn fixed(&self) -> u64 {
        0
    }

    /// A sentence about something that was decided against the first choice, once.
    fn notice(&mut self) -> Option<String> {
        None
    }
}

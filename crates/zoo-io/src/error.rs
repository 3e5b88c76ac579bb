//! What can go wrong with a transfer; every sentence carries the path and the numbers.

use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

/// Reads bring bytes from a file into memory, writes bring them from memory into a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
}

impl std::fmt::Display for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Direction::Read => "read",
            Direction::Write => "write",
        })
    }
}

/// A place in a file: what an error is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: Arc<Path>,
    /// First byte in that file.
    pub offset: u64,
    /// Number of bytes; none where it is about the file.
    pub len: u64,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.len == 0 {
            return write!(f, "{}", self.path.display());
        }
        write!(f, "{} bytes at offset {} of {}", self.len, self.offset, self.path.display())
    }
}

/// Why an operation failed. Cloned freely: the waiter of the operation and the handle's `wait` may both tell it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// The kernel said no.
    #[error("{what} {place}: {} (errno {errno}){}", strerror(*.errno), hint(*.errno, .what))]
    Os {
        /// `read`, `write`, `open`, `sync` or `allocate`.
        what: &'static str,
        /// Where.
        place: Place,
        /// The kernel's number.
        errno: i32,
    },
    /// GPUDirect Storage said no.
    #[error("{what} {place}: {why}; a buffer in host memory does not need GPUDirect Storage")]
    Gpu {
        /// `read` or `write`.
        what: &'static str,
        /// Where.
        place: Place,
        /// cuFile's reason.
        why: String,
    },
    /// The file ends before the range does.
    #[error("read {place}: the file ends at byte {end}; it is shorter than asked for, or shrank meanwhile")]
    UnexpectedEnd {
        /// What was to be read.
        place: Place,
        /// Size of the file, as far as it is known.
        end: u64,
    },
    /// The device keeps accepting less than one block.
    #[error("write {place}: only {done} bytes were accepted after {attempts} attempts")]
    NoProgress {
        /// What was to be written.
        place: Place,
        /// Bytes that were accepted.
        done: u64,
        /// How often it was tried.
        attempts: u32,
    },
    /// The bytes are not the ones the checksum was made of.
    #[error(
        "read {place}: crc32c is {found:#010x}, expected {expected:#010x}; the bytes on disk are not what was written"
    )]
    Checksum {
        /// What was read.
        place: Place,
        /// The caller's number.
        expected: u32,
        /// That of the bytes.
        found: u32,
    },
    /// The engine was told to drop what it had not begun.
    #[error("{direction} {place}: cancelled before it was finished, because the engine was aborted")]
    Cancelled {
        /// Which way.
        direction: Direction,
        /// Where.
        place: Place,
    },
    /// Nothing can be submitted any more.
    #[error("the engine is closed; make a new one")]
    Closed,
    /// The threads of an engine do not come along into a forked process.
    #[error("the engine belongs to process {owner} and this is process {here}: make an engine after the fork")]
    Forked {
        /// The process that made it.
        owner: u32,
        /// The process that asks.
        here: u32,
    },
    /// The memory of a pool does not come along into a forked process.
    #[error(
        "the pool belongs to process {owner} and this is process {here}, which has none of its memory: make a pool \
         after the fork"
    )]
    PoolForked {
        /// The process that made it.
        owner: u32,
        /// The process that asks.
        here: u32,
    },
    /// A worker thread ended by a fault of its own.
    #[error("an I/O worker ended unexpectedly ({0}); the engine cannot be used any more")]
    WorkerDied(String),
    /// The user's mistake: what was given, what is allowed, how to fix it.
    #[error("{0}")]
    Invalid(String),
    /// A pool or the system has no more memory.
    #[error("{0}")]
    NoRoom(String),
    /// Something that was explicitly asked for is not to be had here.
    #[error("{0}")]
    Unavailable(String),
}

impl Error {
    /// An error of the operating system at a place.
    pub fn os(what: &'static str, path: &Arc<Path>, offset: u64, len: u64, errno: i32) -> Self {
        Error::Os { what, place: Place { path: Arc::clone(path), offset, len }, errno }
    }
}

/// The kernel's sentence for an errno, without Rust's `(os error …)`.
pub fn strerror(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

fn hint(errno: i32, what: &str) -> &'static str {
    match (errno, what) {
        (libc::ENOSPC | libc::EDQUOT, _) => "; free some space or choose another path",
        (libc::EFBIG, _) => "; the file would exceed the file system's or the process's limit",
        (libc::EROFS, _) => "; the file system is read-only",
        (libc::EINVAL, "read" | "write") => "; if the device refuses direct transfers, ask for buffered ones",
        (libc::EOPNOTSUPP, "read" | "write") => "; polled completion needs a device with polled queues",
        (libc::EMFILE | libc::ENFILE, _) => "; close some files, or raise the limit of open files (ulimit -n)",
        (libc::EFAULT, _) => "; the memory is not mapped, or a read may not write to it",
        (libc::ENOENT, "open") => "; a read needs an existing file, a write an existing folder",
        _ => "",
    }
}

/// What `std::io` reported, as a number.
pub(crate) fn errno_of(error: &std::io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_carry_path_offset_length_and_reason() {
        let path: Arc<Path> = Arc::from(Path::new("/d/t.bin"));
        let text = Error::os("write", &path, 4096, 512, libc::ENOSPC).to_string();
        assert_eq!(
            text,
            "write 512 bytes at offset 4096 of /d/t.bin: No space left on device (errno 28); \
             free some space or choose another path"
        );
    }
}

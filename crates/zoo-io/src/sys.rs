//! The system calls the engine needs, each behind a function that turns -1 into `io::Error`.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_size(result: libc::ssize_t) -> Result<usize, i32> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Open `path` with raw flags; `O_CLOEXEC` is added.
pub fn open(path: &Path, flags: libc::c_int) -> io::Result<OwnedFd> {
    let name = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the path contains a zero byte"))?;
    loop {
        // SAFETY: `name` is a C string that outlives the call; the mode is only read with O_CREAT.
        match check(unsafe { libc::open(name.as_ptr(), flags | libc::O_CLOEXEC, 0o644) }) {
            Ok(fd) => {
                // SAFETY: the descriptor was just made and belongs to nobody else.
                let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                return clear_nonblocking(&fd).map(|()| fd);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// `O_NONBLOCK` is for `open` alone: on some file systems a ring would otherwise answer EAGAIN instead of waiting.
fn clear_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: no memory is passed.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    if flags & libc::O_NONBLOCK != 0 {
        // SAFETY: no memory is passed.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) })?;
    }
    Ok(())
}

/// Sleep while `word` has the value `seen`, at most `patience`; it may return early. Processes share the word.
pub fn futex_wait(word: &AtomicU32, seen: u32, patience: Duration) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(patience.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: patience.subsec_nanos().into(),
    };
    // SAFETY: the kernel reads the word and the time, which live as long as the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const time) };
}

/// Wake everybody who sleeps on `word`, in whatever process.
pub fn futex_wake_all(word: &AtomicU32) {
    // SAFETY: only the address is used.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Positional read into raw memory.
///
/// # Safety
/// `ptr..ptr + len` is writable for the length of the call.
pub unsafe fn pread(fd: RawFd, ptr: *mut u8, len: usize, offset: u64) -> Result<usize, i32> {
    // SAFETY: promised by the caller.
    check_size(unsafe { libc::pread(fd, ptr.cast(), len, offset.cast_signed()) })
}

/// Positional write from raw memory.
///
/// # Safety
/// `ptr..ptr + len` is readable for the length of the call.
pub unsafe fn pwrite(fd: RawFd, ptr: *const u8, len: usize, offset: u64) -> Result<usize, i32> {
    // SAFETY: promised by the caller.
    check_size(unsafe { libc::pwrite(fd, ptr.cast(), len, offset.cast_signed()) })
}

/// Bring the data of a file, and as much of its metadata as reading it back needs, onto the device.
pub fn fdatasync(fd: RawFd) -> Result<usize, i32> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::fdatasync(fd) }).map(|_| 0).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

/// What the kernel says about direct transfers of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectSupport {
    /// Alignments of memory addresses and of file offsets, in bytes.
    Aligned {
        /// Of addresses in memory.
        memory: u64,
        /// Of offsets and lengths in the file.
        offset: u64,
    },
    /// The file system does not do direct transfers of this file.
    No,
    /// The kernel is too old to say (before 6.1).
    Unknown,
}

/// `STATX_DIOALIGN` of an open file.
pub fn direct_support(fd: RawFd) -> DirectSupport {
    // SAFETY: statx is plain numbers, for which zeros are a value.
    let mut facts: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the empty path with AT_EMPTY_PATH means `fd` itself; `facts` is writable and of the right size.
    let result = unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut facts) };
    if result != 0 || facts.stx_mask & libc::STATX_DIOALIGN == 0 {
        return DirectSupport::Unknown;
    }
    match (facts.stx_dio_mem_align, facts.stx_dio_offset_align) {
        (0, _) | (_, 0) => DirectSupport::No,
        (memory, offset) => DirectSupport::Aligned { memory: memory.into(), offset: offset.into() },
    }
}

/// Block size of the file system an open file lives on, in bytes.
pub fn block_size(fd: RawFd) -> u64 {
    // SAFETY: statvfs is plain numbers, for which zeros are a value.
    let mut facts: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `facts` is writable and of the right size.
    if unsafe { libc::fstatvfs(fd, &raw mut facts) } == 0 { facts.f_bsize } else { 4096 }
}

/// The largest file that this process may write, in bytes (`ulimit -f`).
pub fn largest_file() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is writable and of the right size.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    limit.rlim_cur
}

/// `FS_IOC_FIEMAP` asks where `[offset, offset + len)` lies; with no room for extents it counts them.
#[repr(C)]
struct Extents {
    offset: u64,
    len: u64,
    flags: u32,
    found: u32,
    room: u32,
    _reserved: u32,
}

/// Whether the file system has certainly less than `[from, end)` of an open file needs: none of the blocks that begin there
/// has space yet, and fewer are free. False where it does not say.
pub fn lacks_room(fd: RawFd, from: u64, end: u64) -> bool {
    const FS_IOC_FIEMAP: libc::Ioctl = 0xC020_660B_u32 as libc::Ioctl;
    // SAFETY: statvfs is plain numbers, for which zeros are a value.
    let mut facts: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `facts` is writable and of the right size.
    if unsafe { libc::fstatvfs(fd, &raw mut facts) } != 0 || facts.f_blocks == 0 {
        return false;
    }
    // SAFETY: no memory is passed.
    let blocks = if unsafe { libc::geteuid() } == 0 { facts.f_bfree } else { facts.f_bavail };
    let offset = from.next_multiple_of(facts.f_bsize.max(1));
    let len = end.saturating_sub(offset);
    if len <= blocks.saturating_mul(facts.f_frsize) {
        return false;
    }
    let mut asked = Extents { offset, len, flags: 0, found: 0, room: 0, _reserved: 0 };
    // SAFETY: `asked` is writable and of the layout that the call has.
    unsafe { libc::ioctl(fd, FS_IOC_FIEMAP, &raw mut asked) == 0 && asked.found == 0 }
}

/// Size in bytes of an open regular file or block device.
pub fn size(fd: RawFd) -> io::Result<u64> {
    // SAFETY: no memory is passed.
    let end = unsafe { libc::lseek(fd, 0, libc::SEEK_END) };
    u64::try_from(end).map_err(|_| io::Error::last_os_error())
}

/// What an open file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
    /// Anything else: positional I/O makes no sense there.
    Other,
}

/// What an open file is, and two numbers that no other file has while this one is there.
pub fn identify(fd: RawFd) -> io::Result<(Sort, (u64, u64))> {
    // SAFETY: stat is plain numbers, for which zeros are a value.
    let mut facts: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `facts` is writable and of the right size.
    check(unsafe { libc::fstat(fd, &raw mut facts) })?;
    let sort = match facts.st_mode & libc::S_IFMT {
        libc::S_IFREG => Sort::Regular,
        libc::S_IFBLK => Sort::Block,
        _ => Sort::Other,
    };
    Ok((sort, (facts.st_dev, facts.st_ino)))
}

/// Cut or lengthen a file.
pub fn truncate(fd: RawFd, len: u64) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::ftruncate(fd, len.cast_signed()) }).map(drop)
}

/// `fallocate` with the given mode.
pub fn fallocate(fd: RawFd, mode: libc::c_int, offset: u64, len: u64) -> io::Result<()> {
    loop {
        // SAFETY: no memory is passed.
        match check(unsafe { libc::fallocate(fd, mode, offset.cast_signed(), len.cast_signed()) }) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// A descriptor that is opened when it is first needed. No lock, not even for a moment: one that another thread has when a
/// process forks is never let go of in the child.
#[derive(Debug)]
pub struct Later(AtomicI32);

impl Later {
    /// Not there yet.
    pub const fn new() -> Self {
        Later(AtomicI32::new(-1))
    }

    /// If it is there.
    pub fn get(&self) -> Option<RawFd> {
        Some(self.0.load(Ordering::Acquire)).filter(|&fd| fd >= 0)
    }

    /// Keep this one, unless another thread was faster; the one that is kept.
    pub fn keep(&self, fd: OwnedFd) -> RawFd {
        match self.0.compare_exchange(-1, fd.as_raw_fd(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fd.into_raw_fd(),
            Err(first) => first,
        }
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        if let Some(fd) = self.get() {
            // SAFETY: put there by `keep`, which owned it, and used by nobody any more.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}

/// A counter in the kernel on which a thread can sleep; a wake that comes first is kept.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    /// A new one, at zero. `nonblocking` reads return at once when it is zero.
    pub fn new(nonblocking: bool) -> io::Result<Self> {
        let flags = libc::EFD_CLOEXEC | if nonblocking { libc::EFD_NONBLOCK } else { 0 };
        // SAFETY: no memory is passed.
        let fd = check(unsafe { libc::eventfd(0, flags) })?;
        // SAFETY: the descriptor was just made and belongs to nobody else.
        Ok(EventFd(unsafe { File::from_raw_fd(fd) }))
    }

    /// Add one; whoever sleeps on it wakes up.
    pub fn wake(&self) {
        let one = 1_u64.to_ne_bytes();
        // The counter cannot overflow in practice (2^64 wakes), and a failed wake has nobody to be told.
        // SAFETY: eight readable bytes.
        let _ = unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Sleep until it is woken; sets it back to zero.
    pub fn sleep(&self) {
        let mut count = [0_u8; 8];
        // SAFETY: eight writable bytes.
        let _ = unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

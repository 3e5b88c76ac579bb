//! A piece of anonymous memory with a name that is never used twice.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{HUGE_PAGE, PageLock};
use crate::error::{Error, errno_of, strerror};

/// Anonymous memory at a multiple of 2 MiB, on huge pages where the kernel has them, zero at first.
///
/// Rings register regions by identity, not by address: an address may come back with other pages behind it.
#[derive(Debug)]
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    mapping: (NonNull<u8>, usize),
    id: u64,
    lock: Option<Arc<dyn PageLock>>,
}

// SAFETY: a region is plain memory; who may touch which bytes is decided by whoever hands them out (the pool, the slots).
unsafe impl Send for Region {}
// SAFETY: as above; `Region` itself has no interior state.
unsafe impl Sync for Region {}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);
static DROPPED: AtomicU64 = AtomicU64::new(0);
/// Start address of each live region, with its length and name.
static LIVE: Mutex<BTreeMap<usize, (usize, u64)>> = Mutex::new(BTreeMap::new());

fn live() -> MutexGuard<'static, BTreeMap<usize, (usize, u64)>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many regions were dropped so far; rings look whether it moved and let go of what they registered.
pub(crate) fn dropped_so_far() -> u64 {
    DROPPED.load(Ordering::Acquire)
}

/// The region `[address, address + len)` lies in, as its name, start and length.
pub(crate) fn find(address: usize, len: usize) -> Option<(u64, usize, usize)> {
    let live = live();
    let (&start, &(size, id)) = live.range(..=address).next_back()?;
    (address - start + len <= size).then_some((id, start, size))
}

pub(crate) fn is_live(id: u64) -> bool {
    live().values().any(|&(_, other)| other == id)
}

impl Region {
    /// Map `len` bytes; with a lock, page-lock them as well.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no bytes, [`Error::NoRoom`] when the kernel has no more,
    /// [`Error::Unavailable`] when the lock refuses.
    pub fn new(len: usize, lock: Option<Arc<dyn PageLock>>) -> Result<Region, Error> {
        if len == 0 || len > isize::MAX as usize - HUGE_PAGE {
            return Err(Error::Invalid(format!("a region of {len} bytes; allowed is 1 to 2^63 less a huge page")));
        }
        let mapped = len + HUGE_PAGE;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags | libc::MAP_NORESERVE, -1, 0) };
        let base = match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => base,
            _ => {
                let errno = errno_of(&std::io::Error::last_os_error());
                return Err(Error::NoRoom(format!("{len} bytes of memory: {}", strerror(errno))));
            }
        };
        let skip = base.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: `skip` is less than a huge page and the mapping is that much longer than `len`.
        let start = unsafe { base.add(skip) };
        // SAFETY: advice about a mapping of our own; it may be refused, then pages are small.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        let mut region =
            Region { start, len, mapping: (base, mapped), id: NEXT_ID.fetch_add(1, Ordering::Relaxed), lock: None };
        if let Some(lock) = lock {
            lock.lock(region.start, len).map_err(Error::Unavailable)?;
            region.lock = Some(lock);
        }
        live().insert(start.as_ptr() as usize, (len, region.id));
        Ok(region)
    }

    /// First byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Name, start and length: what rings know it by.
    pub(crate) fn describe(&self) -> (u64, usize, usize) {
        (self.id, self.start.as_ptr() as usize, self.len)
    }

    /// Whether the pages are locked for a GPU.
    pub fn is_page_locked(&self) -> bool {
        self.lock.is_some()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        live().remove(&(self.start.as_ptr() as usize));
        DROPPED.fetch_add(1, Ordering::Release);
        if let Some(lock) = self.lock.take() {
            lock.unlock(self.start);
        }
        let (base, len) = self.mapping;
        // SAFETY: the mapping is ours, and whoever used its bytes held the region.
        unsafe { libc::munmap(base.as_ptr().cast(), len) };
    }
}

//! A piece of anonymous memory with a name that is never used twice.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::{HUGE_PAGE, PageLock, Reservation};
use crate::error::{Error, errno_of, strerror};
use crate::process::PerProcess;
use crate::sync::Alarm;

/// Anonymous memory at a multiple of 2 MiB, on huge pages where the kernel has them, zero at first.
///
/// Rings register regions by identity, not by address: an address may come back with other pages behind it. What rings
/// have registered stays mapped, and in the account of its reservation, until they have let go of it. A forked process
/// has none of it: no page is shared that a device may be writing or a driver be locking at that moment.
#[derive(Debug)]
pub struct Region {
    mapping: Arc<Mapping>,
    len: usize,
}

/// The pages of a region; whoever holds it keeps them where they are.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    whole: (NonNull<u8>, usize),
    id: u64,
    process: u32,
    lock: Option<Arc<dyn PageLock>>,
    held: Option<Reservation>,
    /// Alarms of the workers whose rings registered it.
    pinned_by: Mutex<Vec<Arc<Alarm>>>,
}

// SAFETY: a region is plain memory; who may touch which bytes is decided by whoever hands them out (the pool, the slots).
unsafe impl Send for Mapping {}
// SAFETY: as above; what changes is behind a lock.
unsafe impl Sync for Mapping {}

/// Where bytes lie: the region, and offsets in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Home {
    /// The region's name.
    pub(crate) id: u64,
    /// Address of its first byte.
    pub(crate) start: usize,
    /// Its length.
    pub(crate) len: usize,
    /// First byte of those that are used, and the one after the last: their pages may be touched.
    pub(crate) used: (usize, usize),
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);
static DROPPED: AtomicU64 = AtomicU64::new(0);

struct Live {
    len: usize,
    id: u64,
    mapping: Weak<Mapping>,
}

/// The regions of this process; a forked one has none of its parent's.
#[derive(Default)]
struct Registry {
    /// By their start addresses.
    live: Mutex<BTreeMap<usize, Live>>,
    /// Names of regions that were dropped and whose pages are still mapped.
    leaving: Mutex<BTreeSet<u64>>,
    left: Condvar,
}

static REGISTRY: PerProcess<Registry> = PerProcess::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many regions were dropped so far; rings look whether it moved and let go of what they registered.
pub(crate) fn dropped_so_far() -> u64 {
    DROPPED.load(Ordering::Acquire)
}

/// The region `[address, address + len)` lies in.
pub(crate) fn find(address: usize, len: usize) -> Option<Home> {
    let live = lock(&REGISTRY.get().live);
    let (&start, region) = live.range(..=address).next_back()?;
    let used = (address - start, address - start + len);
    (used.1 <= region.len).then_some(Home { id: region.id, start, len: region.len, used })
}

pub(crate) fn is_live(id: u64) -> bool {
    lock(&REGISTRY.get().live).values().any(|region| region.id == id)
}

/// Keep the pages of a live region; `alarm` is rung when it is dropped, so that they are let go of.
pub(crate) fn pin(home: &Home, alarm: &Arc<Alarm>) -> Option<Arc<Mapping>> {
    let live = lock(&REGISTRY.get().live);
    let mapping = live.get(&home.start).filter(|region| region.id == home.id)?.mapping.upgrade()?;
    let mut pinned_by = lock(&mapping.pinned_by);
    if !pinned_by.iter().any(|other| Arc::ptr_eq(other, alarm)) {
        pinned_by.push(Arc::clone(alarm));
    }
    drop(pinned_by);
    Some(mapping)
}

/// Wait until the regions that are dropped by now are unmapped, at most so long; whether they are.
///
/// Never on a worker's thread and never under a lock that one takes: it is the workers that let go.
pub(crate) fn wait_until_gone(timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    let registry = REGISTRY.get();
    let mut leaving = lock(&registry.leaving);
    let mine = leaving.clone();
    while !leaving.is_disjoint(&mine) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        leaving = registry.left.wait_timeout(leaving, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

impl Region {
    /// Map `len` bytes; with a lock, page-lock them as well. `held` goes back when they are unmapped.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no bytes, [`Error::NoRoom`] when the kernel has no more,
    /// [`Error::Unavailable`] when the lock refuses.
    pub fn new(len: usize, lock: Option<Arc<dyn PageLock>>, held: Option<Reservation>) -> Result<Region, Error> {
        if len == 0 || len > isize::MAX as usize - HUGE_PAGE {
            return Err(Error::Invalid(format!("a region of {len} bytes; allowed is 1 to 2^63 less a huge page")));
        }
        let refused = |what: &str| {
            let errno = errno_of(&std::io::Error::last_os_error());
            Error::NoRoom(format!("{len} bytes of memory{what}: {}", strerror(errno)))
        };
        let mapped = len + HUGE_PAGE;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags | libc::MAP_NORESERVE, -1, 0) };
        let base = match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => base,
            _ => return Err(refused("")),
        };
        let skip = base.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: `skip` is less than a huge page and the mapping is that much longer than `len`.
        let start = unsafe { base.add(skip) };
        let mut mapping = Mapping {
            start,
            whole: (base, mapped),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            process: std::process::id(),
            lock: None,
            held,
            pinned_by: Mutex::default(),
        };
        // Before anything is locked or registered: a fork at that moment would share pages that a device is to write.
        // SAFETY: advice about a mapping of our own.
        if unsafe { libc::madvise(base.as_ptr().cast(), mapped, libc::MADV_DONTFORK) } != 0 {
            return Err(refused(" that forked processes do not get"));
        }
        // SAFETY: as above; it may be refused, then pages are small.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        if let Some(lock) = lock {
            lock.lock(start, len).map_err(Error::Unavailable)?;
            mapping.lock = Some(lock);
        }
        let mapping = Arc::new(mapping);
        let live = Live { len, id: mapping.id, mapping: Arc::downgrade(&mapping) };
        self::lock(&REGISTRY.get().live).insert(start.as_ptr() as usize, live);
        Ok(Region { mapping, len })
    }

    /// First byte.
    pub fn start(&self) -> NonNull<u8> {
        self.mapping.start
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn id(&self) -> u64 {
        self.mapping.id
    }

    /// What rings know it by; all of it is used.
    pub(crate) fn describe(&self) -> Home {
        Home { id: self.id(), start: self.start().as_ptr() as usize, len: self.len, used: (0, self.len) }
    }

    /// Whether the pages are locked for a GPU.
    pub fn is_page_locked(&self) -> bool {
        self.mapping.lock.is_some()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.mapping.process != std::process::id() {
            return;
        }
        // In this order: a ring that is woken sees the drop, and whoever waits finds it leaving until it is gone.
        let registry = REGISTRY.get();
        lock(&registry.live).remove(&(self.start().as_ptr() as usize));
        lock(&registry.leaving).insert(self.id());
        DROPPED.fetch_add(1, Ordering::Release);
        lock(&self.mapping.pinned_by).iter().for_each(|alarm| alarm.wake());
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a forked process there may be something else at this address by now.
        if self.process != std::process::id() {
            return;
        }
        if let Some(lock) = self.lock.take() {
            lock.unlock(self.start);
        }
        let (base, len) = self.whole;
        // SAFETY: the mapping is ours, and whoever used its bytes held it.
        unsafe { libc::munmap(base.as_ptr().cast(), len) };
        // Not before: until here the bytes were taken.
        drop(self.held.take());
        let registry = REGISTRY.get();
        lock(&registry.leaving).remove(&self.id);
        registry.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Fork, do `work` in the child, and say whether it came to its end with `true`.
    fn forked(work: impl Fn() -> bool) -> bool {
        // SAFETY: the child calls nothing but `work`, and ends without running anything of the parent's.
        match unsafe { libc::fork() } {
            // SAFETY: as above.
            0 => unsafe { libc::_exit(i32::from(!work())) },
            child => {
                let (deadline, mut status) = (Instant::now() + Duration::from_secs(5), 1);
                // SAFETY: a child of our own, and a writable number.
                let mut wait = |flags| unsafe { libc::waitpid(child, &raw mut status, flags) };
                while wait(libc::WNOHANG) != child {
                    if Instant::now() > deadline {
                        // SAFETY: as above.
                        unsafe { libc::kill(child, libc::SIGKILL) };
                        wait(0);
                        break;
                    }
                    std::thread::sleep(Duration::from_micros(100));
                }
                status == 0
            }
        }
    }

    /// What another thread had locked at the moment of the fork stays locked in the child, which has no such thread.
    #[test]
    fn a_fork_while_threads_take_and_drop_hangs_nobody() {
        let over = AtomicBool::new(false);
        let held = Region::new(4096, None, None).unwrap();
        let address = held.start().as_ptr() as usize;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let region = Region::new(4096, None, None).unwrap();
                        (0..100).for_each(|_| assert!(find(region.start().as_ptr() as usize, 4096).is_some()));
                        drop(region);
                        wait_until_gone(Duration::from_secs(1));
                    }
                });
            }
            let outcome = (0..100).find(|_| {
                !forked(|| {
                    let region = Region::new(4096, None, None).unwrap();
                    let home = find(region.start().as_ptr() as usize, 1).map(|home| home.id);
                    // The parent's is not mapped here; what is at its address is this one, if anything.
                    let right = home == Some(region.id()) && find(address, 1).is_none_or(|home| home.id == region.id());
                    drop(region);
                    right && wait_until_gone(Duration::from_secs(1))
                })
            });
            over.store(true, Ordering::Relaxed);
            assert_eq!(outcome, None, "the child of this fork hung, or found what is not there");
        });
        assert!(find(address, 1).is_some());
    }

    #[test]
    fn a_forked_process_gets_none_of_it() {
        let region = Region::new(HUGE_PAGE, None, None).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", region.mapping.whole.0.as_ptr() as usize);
        let mine = maps.split_once(&start).map_or("", |(_, rest)| rest);
        let flags = mine.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    }

    #[test]
    fn what_somebody_pinned_stays_in_its_account_until_it_is_let_go_of() {
        let folder = tempfile::tempdir().unwrap();
        let ledger = crate::Ledger::open(&folder.path().join("ledger"), 10_000).unwrap();
        let region = Region::new(4096, None, ledger.reserve(4096)).unwrap();
        let alarm = Arc::new(Alarm::new(true).unwrap());
        let (home, id) = (region.describe(), region.id());
        let pinned = pin(&home, &alarm).unwrap();
        drop(region);
        assert!(pin(&home, &alarm).is_none() && !is_live(id));
        assert_eq!(ledger.stats().reserved, 4096);
        assert!(!wait_until_gone(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            scope.spawn(|| drop(pinned));
            assert!(wait_until_gone(Duration::from_secs(20)));
        });
        assert_eq!(ledger.stats().reserved, 0);
    }
}

//! One account for the pools of several processes: how many bytes they have taken together, under one cap.
//!
//! The pages of a pool stay private to its process; what is shared is a number. It lies in one page of a small file that
//! every process maps, so that a reservation is one compare-exchange and the sum never exceeds the capacity, not even for
//! a moment. Nobody watches over the members: a process that ends without dropping its pools leaves its bytes reserved.
//! Hence a ledger is made for one job and dies with it. Once everybody has opened it the file needs no name any more,
//! and without a name the kernel frees it with the last of the processes, however they end.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, errno_of, strerror};

/// The file is exactly so long: one page.
const SIZE: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"zooledgr");
const VERSION: u64 = 1;
/// With less than this part of the capacity left, unused memory is given back at once.
const SCARCE: u64 = 8;

/// What the page begins with. All fields are atomic, because other processes may write them at any time.
#[repr(C)]
struct Page {
    magic: AtomicU64,
    version: AtomicU64,
    capacity: AtomicU64,
    reserved: AtomicU64,
    peak: AtomicU64,
}

/// What a ledger says, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LedgerStats {
    /// Hard cap of `reserved`.
    pub capacity: u64,
    /// Taken by all that share it.
    pub reserved: u64,
    /// Largest `reserved` so far.
    pub peak: u64,
}

/// A shared count of reserved bytes that never exceeds its capacity.
#[derive(Debug)]
pub struct Ledger {
    page: NonNull<Page>,
    // Of this process's own, checked against the page once: the cap does not depend on what others write.
    capacity: u64,
}

// SAFETY: the page is only reached through atomics, and stays mapped until the ledger is dropped.
unsafe impl Send for Ledger {}
// SAFETY: as above.
unsafe impl Sync for Ledger {}

impl Ledger {
    /// Make the file at `path`, or join the one that is there. Who comes first makes it: it appears under its name with
    /// all of its content or not at all. Only its owner may read and write it.
    ///
    /// # Errors
    /// [`Error::Invalid`] when what is there is no ledger of this version and capacity, or the capacity is 0;
    /// [`Error::Unavailable`] when the file cannot be made, opened or mapped.
    pub fn open(path: &Path, capacity: u64) -> Result<Arc<Ledger>, Error> {
        if capacity == 0 {
            return Err(Error::Invalid("a ledger of 0 bytes; allowed is 1 or more".to_owned()));
        }
        let failed = |what: &str, error: &std::io::Error| {
            Error::Unavailable(format!("{what} the ledger {}: {}", path.display(), strerror(errno_of(error))))
        };
        match create(path, capacity) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed("make", &error)),
            _ => {}
        }
        let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        let file = file.map_err(|error| failed("open", &error))?;
        let facts = file.metadata().map_err(|error| failed("open", &error))?;
        if !facts.is_file() || facts.size() != SIZE as u64 {
            return Err(Error::Invalid(format!(
                "{} is no ledger: it has {} bytes, a ledger is a regular file of {SIZE}; name a file that does not exist",
                path.display(),
                facts.size(),
            )));
        }
        let ledger = Ledger { page: map(&file).map_err(|error| failed("map", &error))?, capacity };
        ledger.check(path)?;
        Ok(Arc::new(ledger))
    }

    fn page(&self) -> &Page {
        // SAFETY: mapped, page-aligned and longer than `Page` until `drop`; made of atomics only, valid for any bytes.
        unsafe { self.page.as_ref() }
    }

    fn check(&self, path: &Path) -> Result<(), Error> {
        let page = self.page();
        let (magic, version) = (page.magic.load(Ordering::Acquire), page.version.load(Ordering::Acquire));
        if (magic, version) != (MAGIC, VERSION) {
            return Err(Error::Invalid(format!(
                "{} is no ledger of this version: it begins with {magic:#018x} and version {version}, expected \
                 {MAGIC:#018x} and {VERSION}; name a file that does not exist, and use one version of zoo",
                path.display(),
            )));
        }
        let there = page.capacity.load(Ordering::Acquire);
        if there != self.capacity {
            return Err(Error::Invalid(format!(
                "the ledger {} has a capacity of {there} bytes and {} were given; all that share it give the same",
                path.display(),
                self.capacity,
            )));
        }
        Ok(())
    }

    /// Count `bytes` as taken, until the reservation is dropped; `None` when that would exceed the capacity.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Option<Reservation> {
        let bytes = bytes as u64;
        let taken = |now: u64| now.checked_add(bytes).filter(|&sum| sum <= self.capacity);
        let before = self.page().reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        self.page().peak.fetch_max(before + bytes, Ordering::AcqRel);
        Some(Reservation { ledger: Arc::clone(self), bytes, process: std::process::id() })
    }

    fn give_back(&self, bytes: u64) {
        // Below zero only if another process writes nonsense; then zero is the best that can be said.
        let less = |now: u64| Some(now.saturating_sub(bytes));
        let _ = self.page().reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
    }

    /// Whether little is left: then nobody keeps memory that it does not use.
    pub fn is_scarce(&self) -> bool {
        let free = self.capacity.saturating_sub(self.page().reserved.load(Ordering::Acquire));
        free < self.capacity / SCARCE
    }

    /// Counts of now, of all that share it.
    pub fn stats(&self) -> LedgerStats {
        LedgerStats {
            capacity: self.capacity,
            reserved: self.page().reserved.load(Ordering::Acquire),
            peak: self.page().peak.load(Ordering::Acquire),
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and has this size; reservations hold the ledger, so nobody uses it any more.
        unsafe { libc::munmap(self.page.as_ptr().cast(), SIZE) };
    }
}

/// Bytes of a ledger; they go back when it is dropped.
#[derive(Debug)]
pub struct Reservation {
    ledger: Arc<Ledger>,
    bytes: u64,
    process: u32,
}

impl Reservation {
    /// How many.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // A forked child has a copy of the reservation, and not of the bytes in the shared account.
        if self.process == std::process::id() {
            self.ledger.give_back(self.bytes);
        }
    }
}

/// Written under another name and linked to its own, which fails if that is taken.
fn create(path: &Path, capacity: u64) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let draft = PathBuf::from(name);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    let mut content = [0_u8; SIZE];
    for (place, value) in content.chunks_exact_mut(8).zip([MAGIC, VERSION, capacity]) {
        place.copy_from_slice(&value.to_ne_bytes());
    }
    // All of the page is written: a hole could turn out to have no room when it is first touched, which is a SIGBUS.
    let done = file.write_all(&content).and_then(|()| std::fs::hard_link(&draft, path));
    let removed = std::fs::remove_file(&draft);
    done.and(removed)
}

fn map(file: &File) -> std::io::Result<NonNull<Page>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping touches nothing that exists; the file has SIZE bytes, and only its owner can cut it.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    match NonNull::new(base.cast::<Page>()) {
        Some(page) if base != libc::MAP_FAILED => Ok(page),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::{PageLock, Pool, PoolBuffer};

    fn fresh(capacity: u64) -> (tempfile::TempDir, PathBuf, Arc<Ledger>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let ledger = Ledger::open(&path, capacity).unwrap();
        (folder, path, ledger)
    }

    #[test]
    fn who_opens_the_same_file_shares_the_account_and_names_do_not_matter_later() {
        let (folder, path, one) = fresh(10_000);
        let two = Ledger::open(&path, 10_000).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::remove_file(&path).unwrap();
        let held = one.reserve(6_000).unwrap();
        assert_eq!(held.bytes(), 6_000);
        assert!(two.reserve(4_001).is_none() && two.reserve(usize::MAX).is_none());
        let rest = two.reserve(4_000).unwrap();
        assert!(one.is_scarce());
        drop(held);
        assert_eq!(two.stats(), LedgerStats { capacity: 10_000, reserved: 4_000, peak: 10_000 });
        assert!(!two.is_scarce());
        drop(rest);
        assert_eq!(one.stats().reserved, 0);
    }

    #[test]
    fn a_reservation_of_a_process_that_forked_away_is_not_given_back_twice() {
        let (_folder, _path, ledger) = fresh(100);
        let mut copy = ledger.reserve(10).unwrap();
        copy.process += 1;
        drop(copy);
        assert_eq!(ledger.stats().reserved, 10);
    }

    #[test]
    fn two_threads_never_hold_more_than_there_is() {
        let (_folder, path, ledger) = fresh(1_000);
        let inside = AtomicU64::new(0);
        let work = || {
            let mine = Ledger::open(&path, 1_000).unwrap();
            let mut refused = 0;
            for k in 0..20_000_usize {
                let bytes = 1 + k * 37 % 700;
                let Some(held) = mine.reserve(bytes) else {
                    refused += 1;
                    continue;
                };
                let now = inside.fetch_add(bytes as u64, Ordering::SeqCst) + bytes as u64;
                assert!(now <= 1_000, "{now}");
                inside.fetch_sub(bytes as u64, Ordering::SeqCst);
                drop(held);
            }
            refused
        };
        let refused: usize = std::thread::scope(|scope| {
            let threads = [scope.spawn(work), scope.spawn(work)];
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(refused < 40_000);
        assert_eq!(ledger.stats().reserved, 0);
        assert!(ledger.stats().peak <= 1_000);
    }

    #[test]
    fn threads_that_open_at_once_find_one_ledger() {
        for _ in 0..50 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("ledger");
            let reserve = || Ledger::open(&path, 100).unwrap().reserve(30).map(std::mem::forget).is_some();
            let got = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(reserve)).collect();
                threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum::<usize>()
            });
            assert_eq!((got, Ledger::open(&path, 100).unwrap().stats().reserved), (3, 90));
        }
    }

    #[test]
    fn what_is_no_ledger_is_refused_and_left_alone() {
        let (_folder, path, _ledger) = fresh(100);
        let good = std::fs::read(&path).unwrap();
        let mut other_version = good.clone();
        other_version[8] = 2;
        let mut other_magic = good.clone();
        other_magic[0] ^= 1;
        let long = [good.clone(), vec![0; 1]].concat();
        let cases = [
            (Vec::new(), "it has 0 bytes, a ledger is a regular file of 4096"),
            (good[..4095].to_vec(), "it has 4095 bytes"),
            (long, "it has 4097 bytes"),
            (vec![0; 4096], "begins with 0x0000000000000000"),
            (other_version, "and version 2, expected"),
            (other_magic, "is no ledger of this version"),
        ];
        for (number, (content, words)) in cases.into_iter().enumerate() {
            let path = path.with_extension(number.to_string());
            std::fs::write(&path, &content).unwrap();
            let error = Ledger::open(&path, 100).unwrap_err();
            assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains(words), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), content);
        }
        let error = Ledger::open(&path, 101).unwrap_err().to_string();
        assert!(error.contains("a capacity of 100 bytes and 101 were given"), "{error}");
        assert!(Ledger::open(&path, 0).unwrap_err().to_string().contains("a ledger of 0 bytes"));
    }

    #[test]
    fn what_cannot_be_opened_is_a_sentence() {
        let (folder, path, _ledger) = fresh(100);
        let error = Ledger::open(&folder.path().join("no/where"), 100).unwrap_err().to_string();
        assert!(error.starts_with("make the ledger ") && error.contains("No such file"), "{error}");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let error = Ledger::open(&link, 100).unwrap_err().to_string();
        assert!(error.starts_with("open the ledger "), "{error}");
        let error = Ledger::open(folder.path(), 100).unwrap_err();
        assert!(matches!(error, Error::Unavailable(_)), "{error}");
    }

    // Pools that share one.

    const PAGE: usize = 4096;

    fn shared(pages: usize, segment: usize, pools: usize) -> (Arc<Ledger>, Vec<Arc<Pool>>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let open = || Ledger::open(&path, (pages * PAGE) as u64).unwrap();
        let pool = |_| Pool::with_ledger(1 << 40, None, segment, Some(open())).unwrap();
        let pools = (0..pools).map(pool).collect();
        (open(), pools)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn pools_on_one_ledger_stay_under_it_together_and_everything_comes_back(
            pages in 1_usize..100,
            segment in 1_usize..20,
            actions in proptest::collection::vec(
                (0_usize..3, any::<bool>(), 1_usize..30, any::<prop::sample::Index>()), 1..80,
            ),
        ) {
            let (ledger, pools) = shared(pages, segment * PAGE, 3);
            let mut held: Vec<Vec<PoolBuffer>> = vec![Vec::new(), Vec::new(), Vec::new()];
            for (who, take, len, which) in actions {
                let reserved = |k: usize| pools[k].stats().reserved;
                if take || held[who].is_empty() {
                    match pools[who].take(len * PAGE) {
                        Ok(buffer) => held[who].push(buffer),
                        // Whoever is refused keeps nothing unused, and the others hold all but what is too little.
                        Err(error) => {
                            prop_assert!(error.to_string().contains("the host memory of the node"), "{}", error);
                            prop_assert!(ledger.stats().reserved as usize + len * PAGE > pages * PAGE);
                            let before = reserved(who);
                            pools[who].trim();
                            prop_assert_eq!(reserved(who), before);
                        }
                    }
                } else {
                    let index = which.index(held[who].len());
                    held[who].swap_remove(index);
                }
                let sum: usize = (0..3).map(reserved).sum();
                prop_assert_eq!(ledger.stats().reserved as usize, sum);
                prop_assert!(sum <= pages * PAGE);
            }
            held.clear();
            pools.iter().for_each(|pool| pool.trim());
            prop_assert_eq!(ledger.stats().reserved, 0);
            prop_assert!(ledger.stats().peak as usize <= pages * PAGE);
        }
    }

    #[test]
    fn what_one_pool_does_not_need_another_may_take() {
        let (ledger, pools) = shared(100, 10 * PAGE, 2);
        let small = pools[0].take(1).unwrap();
        // Ten pages are the region of the small one; all others are to be had.
        let many: Vec<_> = (0..90).map(|_| pools[1].take(PAGE).unwrap()).collect();
        assert_eq!(ledger.stats().reserved as usize, 100 * PAGE);
        let error = pools[1].take(PAGE).unwrap_err();
        assert!(matches!(error, Error::NoRoom(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains("of 409600 bytes 409600 are reserved by all"), "{text}");
        assert!(text.contains("368640 of these by this one"), "{text}");
        drop(many);
        // While it was scarce regions were given back without anybody asking.
        assert!(!ledger.is_scarce());
        let large = pools[0].take(89 * PAGE).map(drop);
        assert!(large.is_err(), "the other one keeps what it has while there is plenty");
        pools[1].trim();
        drop(pools[0].take(89 * PAGE).unwrap());
        drop(small);
    }

    #[test]
    fn what_was_set_aside_stays_and_is_nobody_elses() {
        let (ledger, pools) = shared(64, 4 * PAGE, 2);
        pools[0].set_aside(20 * PAGE - 1).unwrap();
        assert_eq!(ledger.stats().reserved as usize, 20 * PAGE);
        let rest = pools[1].take(44 * PAGE).unwrap();
        assert!(pools[1].set_aside(1).unwrap_err().to_string().contains("the host memory of the node"));
        for _ in 0..3 {
            let held = [7, 13].map(|len| pools[0].take(len * PAGE).unwrap());
            assert!(pools[0].take(1).is_err());
            drop(held);
            pools[0].trim();
        }
        drop(rest);
        let held = [7, 13, 44].map(|len| pools[0].take(len * PAGE).unwrap());
        assert_eq!((ledger.stats().reserved as usize, pools[0].stats().regions), (64 * PAGE, 2));
        drop(held);
        pools[0].trim();
        assert_eq!(ledger.stats().reserved as usize, 20 * PAGE);
        drop(pools);
        assert_eq!(ledger.stats().reserved, 0);
    }

    #[test]
    fn a_small_pool_does_not_set_aside_more_than_its_own_cap() {
        let pool = Pool::new(8 * PAGE, None).unwrap();
        assert!(pool.set_aside(9 * PAGE).unwrap_err().to_string().contains("does not fit into the pool"));
        pool.set_aside(8 * PAGE).unwrap();
        assert_eq!((pool.stats().reserved, pool.stats().in_use), (8 * PAGE, 0));
        drop(pool.take(8 * PAGE).unwrap());
    }

    #[test]
    fn equal_buffers_fill_their_regions() {
        let (ledger, pools) = shared(64, 12 * PAGE, 2);
        let held: Vec<_> = (0..8).map(|k| pools[k % 2].take(5 * PAGE).unwrap()).collect();
        assert_eq!(ledger.stats().reserved as usize, 40 * PAGE);
        // Twelve pages are one buffer of eight and no rest; below eight free pages of 64 nothing is taken in advance.
        let more: Vec<_> = (0..2).map(|k| pools[k].take(8 * PAGE).unwrap()).collect();
        assert_eq!(ledger.stats().reserved as usize, 56 * PAGE);
        let last: Vec<_> = (0..8).map(|k| pools[k % 2].take(PAGE)).collect();
        assert!(last.iter().all(Result::is_ok));
        drop((held, more));
    }

    #[test]
    fn a_buffer_as_large_as_what_is_left_fits_where_a_whole_segment_does_not() {
        let (ledger, pools) = shared(10, 8 * PAGE, 2);
        let one = pools[0].take(PAGE).unwrap();
        let two = pools[1].take(2 * PAGE).unwrap();
        assert_eq!(ledger.stats().reserved as usize, 10 * PAGE);
        drop(one);
        assert_eq!(ledger.stats().reserved as usize, 2 * PAGE, "given back at once while memory is scarce");
        drop(two);
        let pages: Vec<_> = (0..10).map(|k| pools[usize::from(k >= 8)].take(PAGE)).collect();
        assert_eq!(pages.iter().filter(|page| page.is_ok()).count(), 10);
    }

    #[derive(Debug)]
    struct Refusing;

    impl PageLock for Refusing {
        fn lock(&self, _: NonNull<u8>, _: usize) -> Result<(), String> {
            Err("too much".to_owned())
        }
        fn unlock(&self, _: NonNull<u8>) {}
    }

    #[test]
    fn a_region_that_cannot_be_made_is_not_counted() {
        let (ledger, _pools) = shared(1 << 20, PAGE, 1);
        let lock: Arc<dyn PageLock> = Arc::new(Refusing);
        let pool = Pool::with_ledger(1 << 40, Some(lock), PAGE, Some(Arc::clone(&ledger))).unwrap();
        assert!(pool.take(PAGE).unwrap_err().to_string().contains("too much"));
        assert_eq!(ledger.stats().reserved, 0);
    }

    #[test]
    fn threads_with_pools_of_their_own_share_the_ledger() {
        let (ledger, pools) = shared(64, 4 * PAGE, 2);
        std::thread::scope(|scope| {
            for pool in &pools {
                scope.spawn(|| {
                    let mut held = Vec::new();
                    for k in 0..3_000_usize {
                        match pool.take((1 + k * 7 % 13) * PAGE) {
                            Ok(buffer) => held.push(buffer),
                            Err(_) => held.clear(),
                        }
                        assert!(ledger.stats().reserved as usize <= 64 * PAGE);
                    }
                });
            }
        });
        pools.iter().for_each(|pool| pool.trim());
        assert_eq!(ledger.stats().reserved, 0);
    }
}

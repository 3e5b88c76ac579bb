//! A bounded pool of aligned buffers.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{BUFFER_ALIGNMENT, Ledger, PageLock, Region, Reservation, wait_until_gone};
use crate::error::Error;

/// Small buffers share regions of this size unless a pool is told another one, so that a thousand of them are one
/// registration and one page lock.
const SEGMENT: usize = 64 << 20;
/// So long rings may take to let go of a region.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a pool has and had; all but the counts in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Hard cap of `reserved`.
    pub capacity: usize,
    /// Taken from the system.
    pub reserved: usize,
    /// Handed out, rounded to whole pages.
    pub in_use: usize,
    /// Largest `in_use` so far.
    pub peak: usize,
    /// Buffers handed out now.
    pub buffers: usize,
    /// Buffers handed out so far.
    pub allocations: u64,
    /// Regions the reserved bytes lie in.
    pub regions: usize,
}

#[derive(Debug)]
struct Segment {
    region: Region,
    /// Offset and length of the gaps, in order; neighbours are always merged.
    free: BTreeMap<usize, usize>,
    /// Set aside: stays while the pool does, used or not.
    kept: bool,
}

impl Segment {
    fn is_unused(&self) -> bool {
        self.free.get(&0) == Some(&self.region.len())
    }

    /// The smallest gap that is large enough, so that large gaps stay whole.
    fn best_gap(&self, len: usize) -> Option<(usize, usize)> {
        self.free.iter().map(|(&offset, &gap)| (gap, offset)).filter(|&(gap, _)| gap >= len).min()
    }

    fn give_back(&mut self, mut offset: usize, mut len: usize) {
        if let Some((&before, &gap)) = self.free.range(..offset).next_back()
            && before + gap == offset
        {
            self.free.remove(&before);
            (offset, len) = (before, gap + len);
        }
        if let Some(gap) = self.free.remove(&(offset + len)) {
            len += gap;
        }
        self.free.insert(offset, len);
    }
}

#[derive(Debug, Default)]
struct State {
    segments: BTreeMap<u64, Segment>,
    next: u64,
    stats: PoolStats,
}

/// Hands out buffers that start at a page and takes them back when they are dropped. Never holds more than its cap.
///
/// Memory is taken from the system in regions (64 MiB; larger buffers get a region of their own) and kept for the next
/// buffer: the same sequence of buffers step after step takes nothing new. An unused region is given up only when
/// another one is needed and the cap leaves no room.
///
/// Pools that share a [`Ledger`] stay under its capacity together, each under its own cap besides. While the ledger is
/// nearly exhausted ([`Ledger::is_scarce`]) they give up a region as soon as it is unused, so that another one can have it.
#[derive(Debug)]
pub struct Pool {
    state: Mutex<State>,
    lock: Option<Arc<dyn PageLock>>,
    capacity: usize,
    segment: usize,
    ledger: Option<Arc<Ledger>>,
    process: u32,
}

impl Pool {
    /// A pool of at most `capacity` bytes; with a lock, its memory is page-locked.
    ///
    /// # Errors
    /// [`Error::Invalid`] for less than one page.
    pub fn new(capacity: usize, lock: Option<Arc<dyn PageLock>>) -> Result<Arc<Pool>, Error> {
        Pool::with_segment(capacity, lock, SEGMENT)
    }

    /// The same with regions of `segment` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// See [`Pool::new`].
    pub fn with_segment(capacity: usize, lock: Option<Arc<dyn PageLock>>, segment: usize) -> Result<Arc<Pool>, Error> {
        Pool::with_ledger(capacity, lock, segment, None)
    }

    /// The same, and its regions are reserved from an account that other pools share.
    ///
    /// # Errors
    /// See [`Pool::new`].
    pub fn with_ledger(
        capacity: usize,
        lock: Option<Arc<dyn PageLock>>,
        segment: usize,
        ledger: Option<Arc<Ledger>>,
    ) -> Result<Arc<Pool>, Error> {
        if capacity < BUFFER_ALIGNMENT {
            return Err(Error::Invalid(format!(
                "a pool of {capacity} bytes; a buffer takes whole pages, so allowed is {BUFFER_ALIGNMENT} or more"
            )));
        }
        let stats = PoolStats { capacity, ..PoolStats::default() };
        let segment = segment.max(1).checked_next_multiple_of(BUFFER_ALIGNMENT).unwrap_or(SEGMENT);
        let state = Mutex::new(State { stats, ..State::default() });
        Ok(Arc::new(Pool { state, lock, capacity, segment, ledger, process: std::process::id() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its memory is page-locked.
    pub fn is_page_locked(&self) -> bool {
        self.lock.is_some()
    }

    /// A forked process has none of the memory, and the lock may be held for ever there.
    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    fn check_process(&self) -> Result<(), Error> {
        let (owner, here) = (self.process, std::process::id());
        if owner == here { Ok(()) } else { Err(Error::PoolForked { owner, here }) }
    }

    /// Do it, and if there was no room once more when rings have let go of what was given up, by this pool or another one
    /// of its account. Also where nothing is to be waited for: they may have let go in between.
    fn patiently<T>(&self, attempt: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        self.check_process()?;
        match attempt() {
            Err(Error::NoRoom(_)) => {
                wait_until_gone(PATIENCE);
                attempt()
            }
            outcome => outcome,
        }
    }

    /// Counts of now; in a forked process, which has none of the memory, zeros.
    pub fn stats(&self) -> PoolStats {
        if !self.is_here() {
            return PoolStats { capacity: self.capacity, ..PoolStats::default() };
        }
        self.state().stats
    }

    /// Whether the byte at `address` lies in its memory.
    pub fn owns(&self, address: usize) -> bool {
        let inside = |s: &Segment| {
            let start = s.region.start().as_ptr() as usize;
            (start..start + s.region.len()).contains(&address)
        };
        self.is_here() && self.state().segments.values().any(inside)
    }

    /// A buffer of `len` bytes; its content is arbitrary.
    ///
    /// # Errors
    /// [`Error::NoRoom`] when it does not fit under the cap or into the ledger, or the system has no more;
    /// [`Error::PoolForked`].
    pub fn take(self: &Arc<Self>, len: usize) -> Result<PoolBuffer, Error> {
        self.patiently(|| self.take_now(len))
    }

    fn take_now(self: &Arc<Self>, len: usize) -> Result<PoolBuffer, Error> {
        let rounded = len.max(1).checked_next_multiple_of(BUFFER_ALIGNMENT).unwrap_or(usize::MAX);
        let mut guard = self.state();
        let state = &mut *guard;
        let found = state.best(rounded);
        let (key, offset) = match found {
            Some(found) => found,
            None => (self.grow(state, rounded)?, 0),
        };
        let segment = state.segments.get_mut(&key).ok_or_else(|| broken("a segment vanished"))?;
        let gap = segment.free.remove(&offset).ok_or_else(|| broken("a gap vanished"))?;
        if gap > rounded {
            segment.free.insert(offset + rounded, gap - rounded);
        }
        // SAFETY: the gap lies inside the region.
        let start = unsafe { segment.region.start().add(offset) };
        state.stats.in_use += rounded;
        state.stats.peak = state.stats.peak.max(state.stats.in_use);
        state.stats.buffers += 1;
        state.stats.allocations += 1;
        Ok(PoolBuffer { pool: Arc::clone(self), key, offset, rounded, start, len })
    }

    /// Take one region of `len` bytes, rounded to whole pages, and keep it for the buffers to come, used or not: what
    /// fits into it depends on no other pool any more. Its pages take no memory before they are touched, unless locked.
    ///
    /// # Errors
    /// See [`Pool::take`].
    pub fn set_aside(&self, len: usize) -> Result<(), Error> {
        let rounded = len.max(1).checked_next_multiple_of(BUFFER_ALIGNMENT).unwrap_or(usize::MAX);
        self.patiently(|| {
            let mut state = self.state();
            self.make_room(&mut state, rounded)?;
            let (len, held) = self.reserve(&mut state, rounded, rounded)?;
            self.add(&mut state, len, held, true).map(drop)
        })
    }

    fn grow(&self, state: &mut State, rounded: usize) -> Result<u64, Error> {
        let room = self.make_room(state, rounded)?;
        let whole = rounded.max(self.segment.min(room / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT));
        let (len, held) = self.reserve(state, whole, rounded)?;
        self.add(state, len, held, false)
    }

    /// What the pool's own cap leaves, at least `rounded`.
    fn make_room(&self, state: &mut State, rounded: usize) -> Result<usize, Error> {
        let room = |state: &State| self.capacity - state.stats.reserved;
        if room(state) < rounded {
            state.release_unused();
        }
        if room(state) < rounded {
            return Err(Error::NoRoom(format!(
                "a buffer of {rounded} bytes does not fit into the pool: {} of its {} bytes are in use and the largest \
                 gap is {}; free some buffers or make the pool larger",
                state.stats.in_use,
                self.capacity,
                state.largest_gap(room(state)),
            )));
        }
        Ok(room(state))
    }

    fn add(&self, state: &mut State, len: usize, held: Option<Reservation>, kept: bool) -> Result<u64, Error> {
        let region = Region::new(len, self.lock.clone(), held)?;
        let key = state.next;
        state.next += 1;
        state.stats.reserved += len;
        state.segments.insert(key, Segment { region, free: BTreeMap::from([(0, len)]), kept });
        state.stats.regions = state.segments.len();
        Ok(key)
    }

    /// Room in the ledger for about `whole` bytes, or at least for `rounded` after what is unused here has made way.
    ///
    /// A region of a whole number of the buffers that it is made for leaves no rest when more of them come; and where
    /// memory is scarce a region for one buffer is all that is taken. What a pool holds and cannot use, others lack.
    fn reserve(&self, state: &mut State, whole: usize, rounded: usize) -> Result<(usize, Option<Reservation>), Error> {
        let Some(ledger) = &self.ledger else { return Ok((whole, None)) };
        let attempt = |len| ledger.reserve(len).map(|held| (len, Some(held)));
        let roomy = if ledger.is_scarce() { None } else { attempt(whole / rounded * rounded) };
        let found = roomy.or_else(|| {
            state.release_unused();
            attempt(rounded)
        });
        found.ok_or_else(|| {
            let all = ledger.stats();
            Error::NoRoom(format!(
                "a buffer of {rounded} bytes does not fit into the host memory of the node: of {} bytes {} are \
                 reserved by all pools that share them, {} of these by this one, where {} are in use and the largest \
                 gap is {}; free some buffers or raise the cap",
                all.capacity,
                all.reserved,
                state.stats.reserved,
                state.stats.in_use,
                state.largest_gap(0),
            ))
        })
    }

    fn give_back(&self, key: u64, offset: usize, rounded: usize) {
        if !self.is_here() {
            return;
        }
        let mut state = self.state();
        state.stats.in_use -= rounded;
        state.stats.buffers -= 1;
        if let Some(segment) = state.segments.get_mut(&key) {
            segment.give_back(offset, rounded);
            if segment.is_unused() && self.ledger.as_ref().is_some_and(|ledger| ledger.is_scarce()) {
                state.release_unused();
            }
        }
    }

    /// Give unused regions back to the system, but those that were set aside. Waits for the rings that registered them.
    pub fn trim(&self) {
        if self.is_here() {
            self.state().release_unused();
            // Where a worker is busy with one very long transfer the bytes stay in the account until it looks up.
            wait_until_gone(PATIENCE);
        }
    }
}

fn broken(what: &str) -> Error {
    Error::WorkerDied(format!("the pool's book-keeping is broken: {what}"))
}

impl State {
    fn best(&self, len: usize) -> Option<(u64, usize)> {
        let gaps = self.segments.iter().filter_map(|(&key, s)| s.best_gap(len).map(|(gap, offset)| (gap, key, offset)));
        gaps.min().map(|(_, key, offset)| (key, offset))
    }

    fn largest_gap(&self, room: usize) -> usize {
        self.segments.values().flat_map(|s| s.free.values().copied()).max().unwrap_or(0).max(room)
    }

    fn release_unused(&mut self) {
        let stats = &mut self.stats;
        self.segments.retain(|_, segment| {
            let keep = segment.kept || !segment.is_unused();
            if !keep {
                stats.reserved -= segment.region.len();
            }
            keep
        });
        stats.regions = self.segments.len();
    }
}

/// Memory of a pool; goes back when dropped.
#[derive(Debug)]
pub struct PoolBuffer {
    pool: Arc<Pool>,
    key: u64,
    offset: usize,
    rounded: usize,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is the only owner of its bytes, which are plain memory.
unsafe impl Send for PoolBuffer {}

impl PoolBuffer {
    /// First byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length that was asked for, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no byte was asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        self.pool.give_back(self.key, self.offset, self.rounded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn buffers_are_apart_aligned_and_bounded_and_all_come_back(
            capacity in 1_usize..200,
            actions in proptest::collection::vec((any::<bool>(), 0_usize..300_000, any::<prop::sample::Index>()), 1..60),
        ) {
            let capacity = capacity * 4096;
            let pool = Pool::new(capacity, None).unwrap();
            let mut held: Vec<PoolBuffer> = Vec::new();
            for (take, len, which) in actions {
                if take || held.is_empty() {
                    match pool.take(len) {
                        Ok(buffer) => held.push(buffer),
                        Err(error) => {
                            let text = error.to_string();
                            prop_assert!(text.contains("does not fit"), "{}", text);
                        }
                    }
                } else {
                    held.swap_remove(which.index(held.len()));
                }
                let mut ranges: Vec<_> =
                    held.iter().map(|b| (b.start().as_ptr() as usize, b.len().max(1).next_multiple_of(4096))).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.iter().all(|(start, _)| start % BUFFER_ALIGNMENT == 0));
                prop_assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                let stats = pool.stats();
                prop_assert_eq!(stats.in_use, ranges.iter().map(|r| r.1).sum::<usize>());
                prop_assert!(stats.in_use <= stats.reserved && stats.reserved <= capacity);
            }
            held.clear();
            prop_assert_eq!(pool.stats().in_use, 0);
            pool.trim();
            prop_assert_eq!(pool.stats().reserved, 0);
        }
    }

    #[test]
    fn the_same_steps_take_nothing_new() {
        let pool = Pool::new(64 << 20, None).unwrap();
        let step = || (1..20).map(|k| pool.take(k * 100_000).unwrap()).collect::<Vec<_>>();
        drop(step());
        let after_one = pool.stats().reserved;
        for _ in 0..100 {
            drop(step());
        }
        assert_eq!(pool.stats().reserved, after_one);
    }

    #[test]
    fn regions_are_as_large_as_was_asked_and_large_buffers_get_their_own() {
        let pool = Pool::with_segment(1 << 30, None, 3 << 20).unwrap();
        let one = pool.take(1 << 20).unwrap();
        assert_eq!(pool.stats().reserved, 3 << 20);
        let two = pool.take(5 << 20).unwrap();
        assert_eq!((pool.stats().reserved, pool.stats().regions), (8 << 20, 2));
        drop((one, two));
    }

    #[derive(Debug, Default)]
    struct Counting(std::sync::atomic::AtomicI64);

    impl PageLock for Counting {
        fn lock(&self, _: NonNull<u8>, len: usize) -> Result<(), String> {
            if len > 100 << 20 {
                return Err("too much".to_owned());
            }
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(())
        }
        fn unlock(&self, _: NonNull<u8>) {
            self.0.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
        }
    }

    #[test]
    fn regions_are_locked_once_and_unlocked_and_a_refusal_leaves_the_pool_as_it_was() {
        let lock = Arc::new(Counting::default());
        let pool = Pool::new(1 << 30, Some(Arc::clone(&lock) as Arc<dyn PageLock>)).unwrap();
        let buffers: Vec<_> = (0..10).map(|_| pool.take(1 << 20).unwrap()).collect();
        assert_eq!(lock.0.load(std::sync::atomic::Ordering::Relaxed), 1);
        let before = pool.stats();
        assert!(pool.take(200 << 20).unwrap_err().to_string().contains("too much"));
        assert_eq!(pool.stats(), before);
        drop(buffers);
        drop(pool);
        assert_eq!(lock.0.load(std::sync::atomic::Ordering::Relaxed), 0);
    }
}

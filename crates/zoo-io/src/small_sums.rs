//! All-reduces of a few kilobytes between processes that share memory: no message, no thread, no system call while both
//! are awake.
//!
//! Each rank has an area of [`area_bytes`] in memory that all map. It writes nowhere else. An area has
//!
//! ```text
//! bell       u32: counts posts; who waits sleeps on it (a futex)
//! sleepers   u32 of each rank: threads of this rank that sleep on that rank's bell
//! read       u64 of each rank and slot: 1 + the number of that rank's last post in this slot that was read here
//! slots      header (number + 1, tag, bytes) and up to SLOT_BYTES bytes
//! ```
//!
//! Sums have numbers, which count up alike on all ranks; number n is in slot n mod [`SLOTS`]. A post waits for nobody:
//! where a peer has not read what was in its slot before, it is refused. A rank that posts n has read all up to n minus
//! [`SLOTS`] itself: otherwise one could wait for a later post of another, which waits for that slot.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::sys;

/// Sums in flight.
pub const SLOTS: usize = 16;
/// The largest tensor.
pub const SLOT_BYTES: usize = 1 << 15;
const LINE: usize = 64;
const HEADER: usize = LINE;
/// Not a power of two, so that slots do not share the sets of a cache.
const STRIDE: usize = HEADER + SLOT_BYTES + 2 * LINE;
/// A peer that is about to post is waited for awake: putting a thread to sleep and waking it takes as long.
const AWAKE: Duration = Duration::from_micros(20);
/// Elements that are added up at a time.
const BLOCK: usize = 512;

const fn lines(bytes: usize) -> usize {
    bytes.div_ceil(LINE) * LINE
}

/// Bytes of an area of a group of `size` ranks. It begins at a multiple of 64 bytes, and as zeros.
pub const fn area_bytes(size: usize) -> usize {
    slots_at(size) + SLOTS * STRIDE
}

const fn read_at(size: usize) -> usize {
    LINE + lines(4 * size)
}

const fn slots_at(size: usize) -> usize {
    read_at(size) + lines(8 * SLOTS * size)
}

/// What elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// 32-bit floating point.
    F32,
    /// 64-bit floating point.
    F64,
    /// bfloat16: two are added in 32 bits, and each sum is rounded to even.
    Bf16,
    /// 64-bit integers, which wrap around.
    I64,
}

impl Kind {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Kind::F64 | Kind::I64 => 8,
            Kind::F32 => 4,
            Kind::Bf16 => 2,
        }
    }
}

/// What is done with the elements of all ranks, in rank order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The sum.
    Sum,
    /// The largest; NaN where one is.
    Max,
    /// The smallest; NaN where one is.
    Min,
}

/// What a peer has posted where something else was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Other {
    /// Its tag.
    pub tag: i64,
    /// Its size in bytes.
    pub bytes: u64,
}

#[derive(Clone, Copy)]
struct Area {
    base: NonNull<u8>,
    size: usize,
}

impl Area {
    fn word32(&self, at: usize) -> &AtomicU32 {
        // SAFETY: inside of the area, aligned, and only ever used as an atomic.
        unsafe { &*self.base.as_ptr().add(at).cast::<AtomicU32>() }
    }

    fn word64(&self, at: usize) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { &*self.base.as_ptr().add(at).cast::<AtomicU64>() }
    }

    fn bell(&self) -> &AtomicU32 {
        self.word32(0)
    }

    fn sleepers(&self, rank: usize) -> &AtomicU32 {
        self.word32(LINE + 4 * rank)
    }

    fn read(&self, rank: usize, slot: usize) -> &AtomicU64 {
        self.word64(read_at(self.size) + 8 * (rank * SLOTS + slot))
    }

    /// Number + 1, tag and bytes of what is in a slot.
    fn header(&self, slot: usize) -> [&AtomicU64; 3] {
        let at = slots_at(self.size) + slot * STRIDE;
        [self.word64(at), self.word64(at + 8), self.word64(at + 16)]
    }

    fn bytes(&self, slot: usize) -> *mut u8 {
        // SAFETY: inside of the area.
        unsafe { self.base.as_ptr().add(slots_at(self.size) + slot * STRIDE + HEADER) }
    }
}

fn slot_of(number: u64) -> usize {
    (number % SLOTS as u64) as usize
}

/// The small all-reduces of one rank of a group.
pub struct SmallSums {
    areas: Vec<Area>,
    rank: usize,
    next: AtomicU64,
}

// SAFETY: what is shared are atomics, and bytes whose readers and writers take turns by them.
unsafe impl Send for SmallSums {}
// SAFETY: as above.
unsafe impl Sync for SmallSums {}

impl std::fmt::Debug for SmallSums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SmallSums(rank {} of {})", self.rank, self.areas.len())
    }
}

impl SmallSums {
    /// Of rank `rank`, with the areas of all ranks as they are mapped here.
    ///
    /// # Safety
    /// Each address is that of [`area_bytes`]`(addresses.len())` bytes, which stay mapped for as long as this exists and
    /// which only other objects of this kind use, one for each rank.
    ///
    /// # Panics
    /// Of no address, one that is null or no multiple of 64, or a rank that does not exist.
    pub unsafe fn new(addresses: &[usize], rank: usize) -> Self {
        assert!(rank < addresses.len(), "rank {rank} of {}", addresses.len());
        let size = addresses.len();
        let area = |&address: &usize| {
            assert!(address % LINE == 0, "an area begins at {address:#x}");
            NonNull::new(address as *mut u8).map(|base| Area { base, size })
        };
        let areas: Option<Vec<Area>> = addresses.iter().map(area).collect();
        SmallSums { areas: areas.unwrap_or_else(|| panic!("an area at null")), rank, next: AtomicU64::new(0) }
    }

    fn own(&self) -> &Area {
        &self.areas[self.rank]
    }

    fn peers(&self) -> impl Iterator<Item = (usize, &Area)> {
        self.areas.iter().enumerate().filter(|(rank, _)| *rank != self.rank)
    }

    /// Show `bytes` to all peers as this rank's part of the next sum: its number. `None` where a peer has not read what
    /// has its place yet: nothing is counted then.
    ///
    /// One thread at a time posts; it has read the sum that had this slot before.
    ///
    /// # Panics
    /// Of more than [`SLOT_BYTES`].
    pub fn post(&self, tag: i64, bytes: &[u8]) -> Option<u64> {
        assert!(bytes.len() <= SLOT_BYTES, "{} bytes", bytes.len());
        let number = self.next.load(Ordering::Relaxed);
        let slot = slot_of(number);
        let before = (number + 1).saturating_sub(SLOTS as u64);
        if self.peers().any(|(_, peer)| peer.read(self.rank, slot).load(Ordering::Acquire) < before) {
            return None;
        }
        self.next.store(number + 1, Ordering::Relaxed);
        // SAFETY: the slot has room, and nobody reads it before its number is there.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.own().bytes(slot), bytes.len()) };
        let [there, its_tag, its_bytes] = self.own().header(slot);
        its_tag.store(tag.cast_unsigned(), Ordering::Relaxed);
        its_bytes.store(bytes.len() as u64, Ordering::Relaxed);
        there.store(number + 1, Ordering::Release);
        self.own().bell().fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.peers().any(|(_, peer)| peer.sleepers(self.rank).load(Ordering::SeqCst) != 0) {
            sys::futex_wake_all(self.own().bell());
        }
        Some(number)
    }

    /// Whether `peer` has posted sum `number`.
    pub fn is_there(&self, number: u64, peer: usize) -> bool {
        self.areas[peer].header(slot_of(number))[0].load(Ordering::Acquire) > number
    }

    /// Wait for a moment, awake: whether `peer` has posted sum `number`.
    pub fn wait_awake(&self, number: u64, peer: usize) -> bool {
        let begun = Instant::now();
        loop {
            for _ in 0..32 {
                if self.is_there(number, peer) {
                    return true;
                }
                std::hint::spin_loop();
            }
            if begun.elapsed() >= AWAKE {
                return false;
            }
        }
    }

    /// Wait until `peer` has posted sum `number`, at most `patience`: whether it has.
    pub fn wait(&self, number: u64, peer: usize, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let sleepers = self.own().sleepers(peer);
        sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // A post counts the bell up before it looks for sleepers: either it sees this one, or this one sees the post.
        let there = loop {
            let bell = self.areas[peer].bell().load(Ordering::SeqCst);
            if self.is_there(number, peer) {
                break true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            sys::futex_wait(self.areas[peer].bell(), bell, left);
        };
        sleepers.fetch_sub(1, Ordering::SeqCst);
        there
    }

    /// Combine what all ranks have posted as `number`, in rank order, into `out`, which has this rank's own part.
    ///
    /// # Errors
    /// The rank of a peer that has posted something else, and that. Nothing is written then.
    ///
    /// # Panics
    /// Where the size is no number of elements, or a peer has not posted.
    pub fn combine(&self, number: u64, tag: i64, kind: Kind, op: Op, out: &mut [u8]) -> Result<(), (usize, Other)> {
        assert!(out.len().is_multiple_of(kind.bytes()), "{} bytes of {kind:?}", out.len());
        let slot = slot_of(number);
        for (rank, peer) in self.peers() {
            let [there, its_tag, its_bytes] = peer.header(slot);
            assert!(there.load(Ordering::Acquire) > number, "rank {rank} has not posted {number}");
            let found =
                Other { tag: its_tag.load(Ordering::Relaxed).cast_signed(), bytes: its_bytes.load(Ordering::Relaxed) };
            if found != (Other { tag, bytes: out.len() as u64 }) {
                return Err((rank, found));
            }
        }
        let parts: Vec<*const u8> = self.areas.iter().map(|area| area.bytes(slot).cast_const()).collect();
        // SAFETY: all have posted this number, so these bytes are as they stay until this rank has read them.
        unsafe {
            match kind {
                Kind::F32 => combine::<f32>(&parts, op, out),
                Kind::F64 => combine::<f64>(&parts, op, out),
                Kind::Bf16 => combine::<Bf16>(&parts, op, out),
                Kind::I64 => combine::<i64>(&parts, op, out),
            }
        }
        Ok(())
    }

    /// This rank has read what its peers have posted as `number`, or never will.
    pub fn finish(&self, number: u64) {
        for (rank, _) in self.peers() {
            self.own().read(rank, slot_of(number)).store(number + 1, Ordering::Release);
        }
    }
}

trait Element: Copy {
    fn add(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
}

macro_rules! floats {
    ($($t:ty),*) => {$(
        impl Element for $t {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn max(self, other: Self) -> Self {
                if self.is_nan() || self > other { self } else { other }
            }
            fn min(self, other: Self) -> Self {
                if self.is_nan() || self < other { self } else { other }
            }
        }
    )*};
}
floats!(f32, f64);

impl Element for i64 {
    fn add(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
    fn max(self, other: Self) -> Self {
        Ord::max(self, other)
    }
    fn min(self, other: Self) -> Self {
        Ord::min(self, other)
    }
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);

impl Bf16 {
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// Round to nearest, ties to even.
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Bf16(0x7fc0);
        }
        Bf16(((bits + (0x7fff + ((bits >> 16) & 1))) >> 16) as u16)
    }
}

impl Element for Bf16 {
    fn add(self, other: Self) -> Self {
        Bf16::narrow(self.wide() + other.wide())
    }
    fn max(self, other: Self) -> Self {
        Bf16::narrow(Element::max(self.wide(), other.wide()))
    }
    fn min(self, other: Self) -> Self {
        Bf16::narrow(Element::min(self.wide(), other.wide()))
    }
}

/// `out` = op(op(p0, p1), ...).
///
/// # Safety
/// Each part has as many bytes as `out`, whole elements of `T`, and none is `out`.
unsafe fn combine<T: Element>(parts: &[*const u8], op: Op, out: &mut [u8]) {
    // Each known to the compiler, so that it vectorises.
    // SAFETY: promised by the caller.
    unsafe {
        match op {
            Op::Sum => each(parts, T::add, out),
            Op::Max => each(parts, T::max, out),
            Op::Min => each(parts, T::min, out),
        }
    }
}

/// # Safety
/// As [`combine`].
#[inline]
unsafe fn each<T: Element>(parts: &[*const u8], f: impl Fn(T, T) -> T, out: &mut [u8]) {
    let width = size_of::<T>();
    let count = out.len() / width;
    let mut done = 0;
    let mut sums = [std::mem::MaybeUninit::<T>::uninit(); BLOCK];
    while done < count {
        let now = BLOCK.min(count - done);
        // SAFETY: `now` elements from `done` on are inside of every part; elements of all kinds may have any bits.
        unsafe {
            let total = sums.as_mut_ptr().cast::<T>();
            std::ptr::copy_nonoverlapping(parts[0].cast::<T>().add(done), total, now);
            let total = std::slice::from_raw_parts_mut(total, now);
            for part in &parts[1..] {
                let part = std::slice::from_raw_parts(part.cast::<T>().add(done), now);
                for (sum, &value) in total.iter_mut().zip(part) {
                    *sum = f(*sum, value);
                }
            }
            let to = out.as_mut_ptr().add(done * width);
            std::ptr::copy_nonoverlapping(total.as_ptr().cast::<u8>(), to, now * width);
        }
        done += now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Zeroed memory at a multiple of 64 bytes.
    struct Memory {
        _words: Vec<u128>,
        address: usize,
    }

    impl Memory {
        fn new(size: usize) -> Self {
            let words = vec![0_u128; area_bytes(size) / 16 + 4];
            let at = words.as_ptr() as usize;
            Memory { _words: words, address: at.div_ceil(LINE) * LINE }
        }
    }

    fn group(size: usize) -> (Vec<Memory>, Vec<SmallSums>) {
        let memory: Vec<Memory> = (0..size).map(|_| Memory::new(size)).collect();
        let addresses: Vec<usize> = memory.iter().map(|m| m.address).collect();
        // SAFETY: the memory is returned, and held longer.
        let sums = (0..size).map(|rank| unsafe { SmallSums::new(&addresses, rank) }).collect();
        (memory, sums)
    }

    fn bytes_of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn value(rank: usize, number: usize, i: usize) -> f32 {
        ((rank * 31 + number * 7 + i) % 97) as f32 / 8.0 + rank as f32 * 1e-3
    }

    fn expected(size: usize, number: usize, len: usize) -> Vec<u8> {
        let sum = |i| (1..size).fold(value(0, number, i), |sum, rank| sum + value(rank, number, i));
        bytes_of(&(0..len).map(sum).collect::<Vec<_>>())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        /// Ranks that run freely, each with up to `ahead` sums in flight and waiting in an order of its own.
        #[test]
        fn sums_in_rank_order_whoever_is_first(size in 2_usize..5, ahead in 1_usize..8, len in 0_usize..700) {
            let (_memory, sums) = group(size);
            std::thread::scope(|scope| {
                for (rank, mine) in sums.iter().enumerate() {
                    scope.spawn(move || {
                        let mut number = 0;
                        while number < 300 {
                            let batch: Vec<usize> = (number..number + ahead).collect();
                            number += ahead;
                            let mut flying: Vec<(usize, u64, Vec<u8>)> = vec![];
                            for &n in &batch {
                                let out = bytes_of(&(0..len).map(|i| value(rank, n, i)).collect::<Vec<_>>());
                                let at = loop {
                                    if let Some(at) = mine.post(n as i64, &out) {
                                        break at;
                                    }
                                    std::thread::yield_now();
                                };
                                flying.push((n, at, out));
                            }
                            if rank % 2 == 1 {
                                flying.reverse();
                            }
                            for (n, at, mut out) in flying {
                                for peer in (0..size).filter(|&p| p != rank) {
                                    while !mine.wait_awake(at, peer)
                                        && !mine.wait(at, peer, Duration::from_millis(50)) {}
                                }
                                if n % 13 != 5 {
                                    mine.combine(at, n as i64, Kind::F32, Op::Sum, &mut out).unwrap();
                                    assert_eq!(out, expected(size, n, len));
                                }
                                mine.finish(at);
                            }
                        }
                    });
                }
            });
        }

        #[test]
        fn bfloat16_rounds_to_even(a in any::<f32>(), b in any::<f32>()) {
            let (x, y) = (Bf16::narrow(a), Bf16::narrow(b));
            let (exact, found) = (f64::from(x.wide()) + f64::from(y.wide()), x.add(y).wide());
            if exact.is_finite() && found.is_finite() && found != 0.0 {
                let step = f64::from(f32::from_bits(((found.to_bits() >> 16) + 1) << 16)) - f64::from(found);
                prop_assert!((exact - f64::from(found)).abs() <= step.abs() / 2.0 * (1.0 + 1e-4));
            }
        }
    }

    #[test]
    fn a_slot_that_a_peer_has_not_read_is_not_written() {
        let (_memory, sums) = group(2);
        for number in 0..SLOTS {
            assert_eq!(sums[0].post(0, &[1]), Some(number as u64));
        }
        assert_eq!(sums[0].post(0, &[1]), None);
        sums[1].finish(1);
        assert_eq!(sums[0].post(0, &[1]), None);
        sums[1].finish(0);
        assert_eq!(sums[0].post(0, &[1]), Some(SLOTS as u64));
        assert_eq!(sums[0].post(0, &[1]), Some(SLOTS as u64 + 1));
        assert_eq!(sums[0].post(0, &[1]), None);
    }

    #[test]
    fn another_sum_of_a_peer_is_told_and_nothing_is_written() {
        let (_memory, sums) = group(2);
        sums[0].post(7, &bytes_of(&[1.0, 2.0])).unwrap();
        sums[1].post(8, &bytes_of(&[1.0])).unwrap();
        let mut out = bytes_of(&[1.0, 2.0]);
        let found = sums[0].combine(0, 7, Kind::F32, Op::Sum, &mut out);
        assert_eq!(found, Err((1, Other { tag: 8, bytes: 4 })));
        assert_eq!(out, bytes_of(&[1.0, 2.0]));
    }

    #[test]
    fn waiting_ends_with_the_patience() {
        let (_memory, sums) = group(2);
        assert!(!sums[0].wait(0, 1, Duration::from_millis(1)));
        assert_eq!(sums[0].own().sleepers(1).load(Ordering::SeqCst), 0);
    }

    #[test]
    fn the_largest_and_the_smallest_are_nan_where_one_is() {
        let (_memory, sums) = group(2);
        for (rank, part) in [[f32::NAN, 1.0, 3.0, 5.0], [2.0, f32::NAN, 4.0, -6.0]].iter().enumerate() {
            sums[rank].post(0, &bytes_of(part)).unwrap();
        }
        for (op, want) in [(Op::Max, [4.0, 5.0]), (Op::Min, [3.0, -6.0])] {
            let mut out = vec![0; 16];
            sums[0].combine(0, 0, Kind::F32, op, &mut out).unwrap();
            assert!(out.chunks(4).take(2).all(|b| f32::from_le_bytes(b.try_into().unwrap()).is_nan()));
            assert_eq!(out[8..], bytes_of(&want));
        }
    }
}

//! Ordinary memory that takes part in operations again and again: the kernel is asked to move it to huge pages.
//!
//! A device reaches memory in 4 KiB pages in many small pieces: at 0.7 to 0.8 of its bandwidth and for five times the
//! CPU time that huge pages take. Moving costs a second of CPU a GB, once, and changes neither addresses nor content,
//! so memory has to come some times first, and is moved a part at a time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::HUGE_PAGE;

/// Memory that comes this often is moved.
const TIMES: u32 = 4;
/// Less is left alone: its ends are no whole huge pages.
const LEAST: usize = 4 * HUGE_PAGE;
/// What one operation waits for at most: about a tenth of a second.
const AT_ONCE: usize = 64 << 20;
/// Ranges that are remembered; with more of them none comes again soon.
const MOST: usize = 4096;

#[derive(Default)]
struct Seen {
    times: u32,
    /// Bytes from the start that the kernel was asked about.
    asked: usize,
}

/// The memory of an engine's operations that is not of a pool.
#[derive(Default)]
pub(crate) struct Returning(Mutex<HashMap<(usize, usize), Seen>>);

impl Returning {
    /// An operation with this memory is about to begin; its owner keeps it mapped meanwhile.
    pub(crate) fn comes(&self, start: usize, len: usize) {
        if len < LEAST {
            return;
        }
        let part = {
            let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if ranges.len() >= MOST && !ranges.contains_key(&(start, len)) {
                ranges.clear();
            }
            let seen = ranges.entry((start, len)).or_default();
            seen.times = seen.times.saturating_add(1);
            if seen.times < TIMES || seen.asked >= len {
                return;
            }
            let part = (start + seen.asked).next_multiple_of(HUGE_PAGE)..(start + len) / HUGE_PAGE * HUGE_PAGE;
            let part = part.start..part.end.min(part.start + AT_ONCE);
            seen.asked = if part.end + HUGE_PAGE > start + len { len } else { part.end - start };
            part
        };
        if part.is_empty() {
            return;
        }
        // Refused, it is as it was: by kernels before 6.1, for memory of files, for pages that are locked or in flight.
        // SAFETY: the whole pages lie within memory that the caller keeps; what they hold does not change.
        unsafe { libc::madvise(part.start as *mut libc::c_void, part.len(), libc::MADV_COLLAPSE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 160 << 20;

    /// Kilobytes on huge pages of the mapping that begins there.
    fn huge_kilobytes(start: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = maps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
        let line = begin.skip(1).find(|line| line.starts_with("AnonHugePages:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Touched memory, in small pages where the system does not prefer others.
    fn mapped() -> (usize, &'static mut [u8]) {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), LEN, protection, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        // SAFETY: mapped above, for the rest of the process.
        let bytes = unsafe { std::slice::from_raw_parts_mut(base.cast::<u8>(), LEN) };
        for (i, byte) in bytes.iter_mut().enumerate().step_by(997) {
            *byte = (i % 251) as u8;
        }
        (base as usize, bytes)
    }

    #[test]
    fn memory_that_comes_again_is_moved_a_part_at_a_time_and_keeps_its_content() {
        let (start, bytes) = mapped();
        if huge_kilobytes(start) != 0 {
            return; // the system gives huge pages unasked
        }
        let returning = Returning::default();
        for _ in 1..TIMES {
            returning.comes(start, LEN);
            assert_eq!(huge_kilobytes(start), 0);
        }
        let mut before = 0;
        for _ in 0..4 {
            returning.comes(start, LEN);
            let now = huge_kilobytes(start);
            assert!(now >= before && now - before <= AT_ONCE >> 10);
            before = now;
        }
        // SAFETY: as in `comes`; asks whether this kernel moves anything.
        let moves = unsafe { libc::madvise(start as *mut libc::c_void, LEN, libc::MADV_COLLAPSE) } == 0;
        assert!(!moves || before << 10 >= LEN - 2 * HUGE_PAGE, "{before} kB of {LEN} bytes");
        assert!(bytes.iter().enumerate().step_by(997).all(|(i, byte)| *byte == (i % 251) as u8));
    }

    #[test]
    fn memory_that_comes_seldom_or_is_small_stays() {
        let (start, _) = mapped();
        let returning = Returning::default();
        for shift in 0..8 {
            returning.comes(start + shift * 4096, LEN / 2);
            returning.comes(start, LEAST - 1);
        }
        let ranges = returning.0.lock().unwrap();
        assert_eq!(ranges.len(), 8);
        assert!(ranges.values().all(|seen| seen.asked == 0));
    }
}

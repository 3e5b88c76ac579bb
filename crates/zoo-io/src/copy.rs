//! Copies between the engine's bounce buffers and the caller's memory.

/// Copy towards memory that nobody reads soon: past the cache, where the processor can.
///
/// A plain copy first fetches the lines it overwrites; streaming stores do not, which saves a third of the memory
/// traffic of a read (measured on a Zen 4 core: 0.054 to 0.038 s a GB). Into a bounce buffer, which fits the cache and
/// which the device reads next, a plain copy is the faster one.
///
/// # Safety
/// `from..from + len` is readable, `to..to + len` writable, and the two do not overlap.
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= 4096 && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: promised by the caller; AVX2 is there.
        unsafe { stream_avx2(from, to, len) };
        return;
    }
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    /// One cache line pair a step; the line that comes eight steps later is fetched meanwhile.
    const STEP: usize = 128;
    const AHEAD: usize = 1024;
    let head = to.align_offset(64).min(len);
    let steps = (len - head) / STEP;
    // SAFETY: `head` and the tail below are parts of the ranges the caller vouches for; streaming stores go to
    // multiples of 32 because `head` reaches a multiple of 64; a prefetch past the end is a hint and never faults.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for step in 0..steps {
            let (source, sink) = (from.add(head + step * STEP), to.add(head + step * STEP).cast::<__m256i>());
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(AHEAD).cast());
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(AHEAD + 64).cast());
            let source = source.cast::<__m256i>();
            let lines = [0, 1, 2, 3].map(|k| _mm256_loadu_si256(source.add(k)));
            for (k, line) in lines.into_iter().enumerate() {
                _mm256_stream_si256(sink.add(k), line);
            }
        }
        _mm_sfence();
        let done = head + steps * STEP;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_arrives_and_no_other_changes(from in 0_usize..100, to in 0_usize..100, len in 0_usize..20_000) {
            let source: Vec<u8> = (0..20_200).map(|k| (k % 251) as u8).collect();
            let mut sink = vec![255_u8; 20_200];
            // SAFETY: both vectors are longer than offset and length together.
            unsafe { copy_streaming(source.as_ptr().add(from), sink.as_mut_ptr().add(to), len) };
            prop_assert_eq!(&sink[to..to + len], &source[from..from + len]);
            prop_assert!(sink[..to].iter().chain(&sink[to + len..]).all(|&byte| byte == 255));
        }
    }
}

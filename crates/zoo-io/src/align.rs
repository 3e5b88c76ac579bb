//! Alignment arithmetic for direct I/O.
//!
//! `O_DIRECT` moves whole blocks only: offset and length must both be multiples of the device's block. A tensor rarely
//! starts and ends on one, so a byte range is cut into an aligned middle, which may go past the page cache, and two
//! ragged ends shorter than a block, which may not.
//!
//! All numbers are bytes. An alignment is a power of two, so rounding is one mask.

use std::ops::Range;

use thiserror::Error;

/// Why a range cannot be aligned; every sentence carries the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum AlignError {
    /// The alignment is zero or has more than one bit set.
    #[error("alignment of {align} bytes is not a power of two; use the device's block size, such as 512 or 4096")]
    NotPowerOfTwo {
        /// The alignment that was given.
        align: u64,
    },
    /// The next multiple does not fit in 64 bits.
    #[error(
        "{value} rounded up to a multiple of {align} does not fit in 64 bits; the largest aligned offset is {largest}"
    )]
    RoundsPastEnd {
        /// The offset to be rounded.
        value: u64,
        /// The alignment.
        align: u64,
        /// The largest multiple of `align` in 64 bits.
        largest: u64,
    },
    /// The end of the range does not fit in 64 bits.
    #[error("a range of {len} bytes at offset {offset} ends past 64 bits")]
    RangeTooLong {
        /// First byte of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
    },
}

/// A byte range cut at block boundaries; the three parts lie end to end in file order and any of them may be empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// Bytes before the first boundary: shorter than a block.
    pub head: Range<u64>,
    /// Whole blocks: offset and length are multiples of the alignment when it is not empty.
    pub middle: Range<u64>,
    /// Bytes after the last boundary: shorter than a block.
    pub tail: Range<u64>,
}

const fn mask(align: u64) -> Result<u64, AlignError> {
    if align.is_power_of_two() { Ok(align - 1) } else { Err(AlignError::NotPowerOfTwo { align }) }
}

/// The largest multiple of `align` that is at most `value`.
///
/// # Errors
/// [`AlignError::NotPowerOfTwo`].
pub const fn align_down(value: u64, align: u64) -> Result<u64, AlignError> {
    match mask(align) {
        Ok(mask) => Ok(value & !mask),
        Err(error) => Err(error),
    }
}

/// The smallest multiple of `align` that is at least `value`.
///
/// # Errors
/// [`AlignError::NotPowerOfTwo`]; [`AlignError::RoundsPastEnd`] when that multiple does not fit in 64 bits.
pub const fn align_up(value: u64, align: u64) -> Result<u64, AlignError> {
    match mask(align) {
        Ok(mask) => match value.checked_add(mask) {
            Some(sum) => Ok(sum & !mask),
            None => Err(AlignError::RoundsPastEnd { value, align, largest: !mask }),
        },
        Err(error) => Err(error),
    }
}

/// Cut the `len` bytes at `offset` into a ragged head, an aligned middle and a ragged tail.
///
/// A range inside one block has no boundary to cut at: all of it is the head.
///
/// # Errors
/// [`AlignError::NotPowerOfTwo`]; [`AlignError::RangeTooLong`] when `offset + len` does not fit in 64 bits.
pub const fn split(offset: u64, len: u64, align: u64) -> Result<Split, AlignError> {
    let mask = match mask(align) {
        Ok(mask) => mask,
        Err(error) => return Err(error),
    };
    let Some(end) = offset.checked_add(len) else {
        return Err(AlignError::RangeTooLong { offset, len });
    };
    let last = end & !mask;
    // `last < offset` means that no boundary lies in the range; asking first keeps the rounding up below from overflowing.
    if last < offset {
        return Ok(Split { head: offset..end, middle: end..end, tail: end..end });
    }
    let first = if offset & mask == 0 { offset } else { (offset | mask) + 1 };
    Ok(Split { head: offset..first, middle: first..last, tail: last..end })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn alignment() -> impl Strategy<Value = u64> {
        (0_u32..64).prop_map(|shift| 1_u64 << shift)
    }

    proptest! {
        #[test]
        fn down_is_the_nearest_multiple_below(value: u64, align in alignment()) {
            let down = align_down(value, align).unwrap();
            prop_assert_eq!(down % align, 0);
            prop_assert!(down <= value && value - down < align);
        }

        #[test]
        fn up_is_the_nearest_multiple_above_or_says_the_largest(value: u64, align in alignment()) {
            match align_up(value, align) {
                Ok(up) => {
                    prop_assert_eq!(up % align, 0);
                    prop_assert!(up >= value && up - value < align);
                }
                Err(error) => {
                    let largest = align_down(u64::MAX, align).unwrap();
                    prop_assert!(value > largest);
                    prop_assert_eq!(error, AlignError::RoundsPastEnd { value, align, largest });
                }
            }
        }

        #[test]
        fn parts_lie_end_to_end_and_the_middle_is_all_whole_blocks(offset: u64, len: u64, align in alignment()) {
            let Ok(parts) = split(offset, len, align) else {
                prop_assert!(offset.checked_add(len).is_none());
                return Ok(());
            };
            prop_assert_eq!(parts.head.start, offset);
            prop_assert_eq!(parts.head.end, parts.middle.start);
            prop_assert_eq!(parts.middle.end, parts.tail.start);
            prop_assert_eq!(parts.tail.end, offset + len);
            prop_assert!(parts.tail.end - parts.tail.start < align);
            prop_assert!(parts.head.end - parts.head.start < align);
            if !parts.middle.is_empty() {
                prop_assert_eq!(parts.middle.start % align, 0);
                prop_assert_eq!(parts.middle.end % align, 0);
            }
        }

        #[test]
        fn small_ranges_agree_with_counting_blocks(offset in 0_u64..64, len in 0_u64..64, shift in 0_u32..5) {
            let align = 1_u64 << shift;
            let whole = (0..128).filter(|block| block * align >= offset && (block + 1) * align <= offset + len);
            let expected = whole.count() as u64 * align;
            let parts = split(offset, len, align).unwrap();
            prop_assert_eq!(parts.middle.end - parts.middle.start, expected);
        }

        #[test]
        fn other_alignments_are_refused(value: u64, align: u64) {
            prop_assume!(!align.is_power_of_two());
            let refused = AlignError::NotPowerOfTwo { align };
            prop_assert_eq!(align_down(value, align), Err(refused));
            prop_assert_eq!(align_up(value, align), Err(refused));
            prop_assert_eq!(split(0, value, align), Err(refused));
        }
    }

    #[test]
    fn errors_carry_the_numbers() {
        assert_eq!(
            align_down(1, 12).unwrap_err().to_string(),
            "alignment of 12 bytes is not a power of two; use the device's block size, such as 512 or 4096"
        );
        assert_eq!(
            split(u64::MAX, 2, 512).unwrap_err().to_string(),
            "a range of 2 bytes at offset 18446744073709551615 ends past 64 bits"
        );
    }
}

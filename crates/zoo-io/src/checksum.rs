//! CRC-32C of bytes that are read or written in pieces, in any order.
//!
//! The polynomial is Castagnoli's (iSCSI, RFC 3720 appendix B.4), the one ext4, Btrfs and object stores use. The CRC of
//! a concatenation follows from the CRCs of its parts and their lengths, so that the pieces of an operation can be
//! summed as they pass.

use crc_fast::CrcAlgorithm::Crc32Iscsi;

/// CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    // A CRC of 32 bits in a 64-bit word.
    crc_fast::checksum(Crc32Iscsi, bytes) as u32
}

/// CRC-32C of `a` followed by `b`, of which only the sums and the length of `b` in bytes are known.
pub fn combine(a: u32, b: u32, b_len: u64) -> u32 {
    crc_fast::checksum_combine(Crc32Iscsi, a.into(), b.into(), b_len) as u32
}

/// The sums of the pieces of one operation, to be put together when all are there.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Vec<(usize, usize, u32)>);

impl Pieces {
    /// The sum of `len` bytes at `offset`.
    pub(crate) fn add(&mut self, offset: usize, len: usize, sum: u32) {
        self.0.push((offset, len, sum));
    }

    /// Sum of all pieces in order of their offsets.
    pub(crate) fn total(&mut self) -> u32 {
        self.0.sort_unstable();
        self.0.iter().fold(0, |total, &(_, len, sum)| combine(total, sum, len as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One bit at a time, as the definition has it.
    fn by_definition(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0_u32, |mut crc, &byte| {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
            }
            crc
        })
    }

    #[test]
    fn the_check_value_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    proptest! {
        #[test]
        fn pieces_in_any_order_sum_to_the_definition(
            parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..8), seed: u64,
        ) {
            let whole: Vec<u8> = parts.concat();
            let mut at = 0;
            let mut sums: Vec<_> = parts.iter().map(|part| { at += part.len(); (at - part.len(), part) }).collect();
            sums.sort_by_key(|(offset, _)| (*offset as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let mut pieces = Pieces::default();
            for (offset, part) in sums {
                pieces.add(offset, part.len(), crc32c(part));
            }
            prop_assert_eq!(pieces.total(), by_definition(&whole));
        }
    }
}

//! Cutting one operation into transfers that a device accepts.

use crate::error::Direction;
use crate::file::{Alignment, Target, locate};

/// How the bytes of a chunk travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Past the page cache, between the device and the caller's memory.
    Direct,
    /// Past the page cache, between the device and an aligned buffer of the engine's; the engine copies.
    Bounce,
    /// Through the page cache, from or to the caller's memory.
    Buffered,
    /// By GPUDirect Storage, between the device and the memory of a GPU, whatever its address: cuFile copies what it must.
    Gpu,
}

/// A piece of an operation that one system call can move. All numbers are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the file in the target.
    pub file: usize,
    /// First byte of the payload in that file.
    pub offset: u64,
    /// First byte of the payload in memory, from the start of the caller's buffer.
    pub memory: usize,
    /// Length of the payload.
    pub len: usize,
    /// How it travels.
    pub way: Way,
    /// What is transferred: starts before the payload and ends after it where a bounced read is rounded to blocks.
    pub window: (u64, usize),
}

/// The chunks of one operation, made one at a time: a plan of a terabyte takes no more memory than one of a page.
///
/// Within a file chunks end at multiples of the block size. A direct file is cut at its alignment:
///
/// * a write's ragged ends go through the page cache (so that nothing has to be read before it is written, and two
///   writers that share a block do not undo each other), its middle past it;
/// * a read's ragged ends are read as whole blocks into a bounce buffer;
/// * where an address is not aligned as the device wants it, the whole blocks are bounced too.
#[derive(Debug, Clone)]
pub struct Plan {
    direction: Direction,
    gpu: bool,
    shape: Shape,
    base: u64,
    start: u64,
    at: u64,
    end: u64,
    block: u64,
}

/// What a plan needs to know of its target.
#[derive(Debug, Clone)]
struct Shape {
    files: u64,
    stripe: u64,
    alignments: Vec<Option<Alignment>>,
}

impl Plan {
    /// Plan moving `len` bytes between memory at address `base` and the target's bytes at `offset`.
    ///
    /// `block` is the largest window; files with a larger alignment get windows of that size.
    pub fn new(direction: Direction, target: &Target, offset: u64, len: u64, base: u64, block: u64) -> Self {
        let alignments = target.files().iter().map(|file| file.alignment()).collect();
        let shape = Shape { files: target.files().len() as u64, stripe: target.stripe(), alignments };
        Plan { direction, gpu: false, shape, base, start: offset, at: offset, end: offset + len, block }
    }

    /// The same for memory of a GPU: chunks end at multiples of the block, and all go the one way.
    #[must_use]
    pub fn of_gpu(mut self) -> Self {
        self.gpu = true;
        self
    }

    /// Whether every chunk was made.
    pub fn is_done(&self) -> bool {
        self.at >= self.end
    }
}

pub(crate) const fn is_multiple(value: u64, align: u64) -> bool {
    value & (align - 1) == 0
}

const fn down(value: u64, align: u64) -> u64 {
    value & !(align - 1)
}

/// What is left of an operation at one place of one file.
struct Rest {
    offset: u64,
    address: u64,
    /// Bytes up to the end of the operation, of the stripe or of the block, whichever comes first.
    len: u64,
}

impl Rest {
    fn write(&self, alignment: Alignment) -> (u64, Way) {
        let Alignment { memory, offset: align } = alignment;
        if !is_multiple(self.offset, align) {
            return (self.len.min(align - self.offset % align), Way::Buffered);
        }
        if self.len < align {
            return (self.len, Way::Buffered);
        }
        let way = if is_multiple(self.address, memory) { Way::Direct } else { Way::Bounce };
        (down(self.len, align), way)
    }

    fn read(&self, alignment: Alignment) -> (u64, Way) {
        let Alignment { memory, offset: align } = alignment;
        let head = down(self.offset + align - 1, align) - self.offset;
        if self.len < head + align {
            return (self.len, Way::Bounce);
        }
        // With the head out of the way, is the rest where the device can reach it?
        if !is_multiple(self.address + head, memory) {
            return (self.len, Way::Bounce);
        }
        if head > 0 { (head, Way::Bounce) } else { (down(self.len, align), Way::Direct) }
    }
}

impl Iterator for Plan {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        if self.is_done() {
            return None;
        }
        let (file, offset, stripe_rest) = locate(self.at, self.shape.files, self.shape.stripe);
        let alignment = self.shape.alignments.get(file).copied().flatten().filter(|_| !self.gpu);
        let block = alignment.map_or(self.block, |a| self.block.max(a.offset) / a.offset * a.offset);
        let rest = Rest {
            offset,
            address: self.base + (self.at - self.start),
            len: (self.end - self.at).min(stripe_rest).min(block - offset % block),
        };
        let (len, way) = match (alignment, self.direction) {
            (None, _) => (rest.len, if self.gpu { Way::Gpu } else { Way::Buffered }),
            (Some(alignment), Direction::Write) => rest.write(alignment),
            (Some(alignment), Direction::Read) => rest.read(alignment),
        };
        let window = match (alignment, way) {
            (Some(Alignment { offset: align, .. }), Way::Bounce) => {
                let from = down(offset, align);
                (from, (down(offset + len + align - 1, align) - from) as usize)
            }
            _ => (offset, len as usize),
        };
        let memory = (self.at - self.start) as usize;
        self.at += len;
        Some(Chunk { file, offset, memory, len: len as usize, way, window })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::share;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    struct Case {
        write: bool,
        offset: u64,
        len: u64,
        base: u64,
        block: u64,
        files: u64,
        stripe: u64,
        alignments: Vec<Option<Alignment>>,
    }

    fn case() -> impl Strategy<Value = Case> {
        let alignment = proptest::option::of(
            (0_u32..13, 0_u32..4)
                .prop_map(|(memory, offset)| Alignment { memory: 1 << memory, offset: 4096 << offset }),
        );
        let range = (0_u64..200_000, 0_u64..400_000, 0_u64..10_000);
        (any::<bool>(), range, 1_u64..20, 1_u64..5, 1_u64..20, proptest::collection::vec(alignment, 5)).prop_map(
            |(write, (offset, len, base), block, files, stripe, alignments)| Case {
                write,
                offset,
                len,
                base,
                block: block * 4096,
                files,
                // A stripe is a multiple of 4096; of a larger alignment it need not be.
                stripe: if files == 1 { u64::MAX } else { stripe * 4096 },
                alignments,
            },
        )
    }

    /// Any number with up to so many bits: all magnitudes are as likely.
    fn magnitude(bits: u32) -> impl Strategy<Value = u64> {
        (any::<u64>(), 0..=bits).prop_map(|(number, bits)| number.checked_shr(64 - bits).unwrap_or(0))
    }

    /// Whatever an engine lets through: any offset that ends before 2^63, any address, any allowed block, any alignment that
    /// a file may report; as long as some hundred chunks.
    fn any_case() -> impl Strategy<Value = Case> {
        let alignment = proptest::option::of(
            (0_u32..17, 12_u32..17).prop_map(|(memory, offset)| Alignment { memory: 1 << memory, offset: 1 << offset }),
        );
        let near = prop_oneof![Just(0), magnitude(13), magnitude(63).prop_map(|bytes| bytes / 4096 * 4096)];
        let shape = (1_u64..=1 << 18, 1_u64..64, magnitude(50), proptest::collection::vec(alignment, 64));
        (any::<bool>(), magnitude(63), any::<bool>(), near, magnitude(64), 0_u64..200_000, shape).prop_map(
            |(write, offset, from_end, near, base, share, (blocks, files, stripe, alignments))| {
                let block = blocks * 4096;
                let stripe = if files == 1 { u64::MAX } else { (stripe / 4096 + 1) * 4096 };
                // Of the largest length that makes few chunks; an alignment larger than the block makes no more of them.
                let len = (block.min(stripe) as u128 * 300 * u128::from(share) / 200_000) as u64;
                let last = i64::MAX as u64 - len;
                let offset = if from_end { last.saturating_sub(near) } else { offset.min(last) };
                let base = base.min(u64::MAX - len - 4096).max(1);
                Case { write, offset, len, base, block, files, stripe, alignments }
            },
        )
    }

    fn plan(case: &Case) -> Plan {
        Plan {
            direction: if case.write { Direction::Write } else { Direction::Read },
            gpu: false,
            shape: Shape { files: case.files, stripe: case.stripe, alignments: case.alignments.clone() },
            base: case.base,
            start: case.offset,
            at: case.offset,
            end: case.offset + case.len,
            block: case.block,
        }
    }

    /// Every byte once and in order, each where striping says, and every file as many as [`Target::ranges`] says.
    fn check_cover(case: &Case) -> Result<(), TestCaseError> {
        let (mut memory, mut logical) = (0_usize, case.offset);
        let mut totals = vec![0; case.files as usize];
        for chunk in plan(case) {
            prop_assert!(chunk.len > 0);
            prop_assert_eq!(chunk.memory, memory);
            let (row, within) = (logical / case.stripe, logical % case.stripe);
            prop_assert_eq!(chunk.file as u64, row % case.files);
            prop_assert_eq!(chunk.offset, row / case.files * case.stripe + within);
            prop_assert!(within + chunk.len as u64 <= case.stripe);
            prop_assert!(chunk.offset + chunk.len as u64 <= i64::MAX as u64);
            totals[chunk.file] += chunk.len as u64;
            memory += chunk.len;
            logical += chunk.len as u64;
        }
        prop_assert_eq!(memory as u64, case.len);
        for (k, total) in (0..case.files).zip(totals) {
            let upto = |logical| share(logical, k, case.files, case.stripe);
            prop_assert_eq!(upto(case.offset + case.len) - upto(case.offset), total);
        }
        Ok(())
    }

    fn check_ways(case: &Case) -> Result<(), TestCaseError> {
        let slot = case.block.max(1 << 16);
        for chunk in plan(case) {
            let (from, len) = chunk.window;
            let (payload_end, window_end) = (chunk.offset + chunk.len as u64, from + len as u64);
            prop_assert!(from <= chunk.offset && payload_end <= window_end);
            prop_assert!(len as u64 <= slot, "a window fits a bounce buffer");
            let Some(Alignment { memory, offset: align }) = case.alignments[chunk.file] else {
                prop_assert_eq!(chunk.way, Way::Buffered);
                prop_assert!(len as u64 <= case.block);
                continue;
            };
            prop_assert!(len as u64 <= case.block.max(align));
            match chunk.way {
                Way::Buffered => {
                    prop_assert!(case.write, "only a write goes through the page cache of a direct file");
                    prop_assert!((len as u64) < align, "and only its ragged ends");
                }
                Way::Gpu => prop_assert!(false, "nobody asked for a GPU"),
                Way::Direct | Way::Bounce => {
                    prop_assert!(from.is_multiple_of(align) && (len as u64).is_multiple_of(align));
                    let whole = from == chunk.offset && window_end == payload_end;
                    prop_assert!(whole || (!case.write && chunk.way == Way::Bounce), "a write never touches more");
                    let aligned = (case.base + chunk.memory as u64).is_multiple_of(memory);
                    prop_assert!(chunk.way == Way::Bounce || aligned);
                    // What could go without a copy does, but for the ends of a read.
                    prop_assert!(chunk.way == Way::Direct || !aligned || !whole);
                }
            }
        }
        Ok(())
    }

    // `make fuzz-io` asks the same of some million cases; an overflow is a panic in both.
    proptest! {
        #[test]
        fn chunks_cover_the_operation_once_in_order(case in case()) {
            check_cover(&case)?;
        }

        #[test]
        fn every_chunk_can_travel_the_way_it_says(case in case()) {
            check_ways(&case)?;
        }

        #[test]
        fn whatever_an_engine_lets_through_is_covered_once_in_ways_that_work(case in any_case()) {
            check_cover(&case)?;
            check_ways(&case)?;
        }

        #[test]
        fn memory_of_a_gpu_is_covered_once_by_whole_blocks_and_their_ends(case in any_case()) {
            let chunks: Vec<_> = plan(&case).of_gpu().collect();
            let mut next = 0;
            for chunk in &chunks {
                prop_assert_eq!((chunk.way, chunk.memory, chunk.window), (Way::Gpu, next, (chunk.offset, chunk.len)));
                prop_assert!(0 < chunk.len && chunk.offset % case.block + chunk.len as u64 <= case.block);
                next += chunk.len;
            }
            prop_assert_eq!(next as u64, case.len);
        }

        #[test]
        fn aligned_operations_have_no_copies(blocks in 0_u64..50, at in 0_u64..50, block in 1_u64..9, write: bool) {
            let case = Case {
                write, offset: at * 4096, len: blocks * 4096, base: 1 << 20, block: block * 4096, files: 1,
                stripe: u64::MAX, alignments: vec![Some(Alignment { memory: 512, offset: 4096 })],
            };
            prop_assert!(plan(&case).all(|chunk| chunk.way == Way::Direct));
        }
    }
}

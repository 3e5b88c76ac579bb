//! Bounce buffers of a worker.

use std::sync::Arc;

use crate::error::Error;
use crate::memory::{Ledger, Region};

/// Aligned buffers for what cannot travel in place.
pub(crate) struct Slots {
    pub(crate) region: Region,
    /// Of each, in bytes.
    pub(crate) size: usize,
    /// Numbers of those that nobody uses.
    pub(crate) free: Vec<usize>,
}

impl Slots {
    /// `most` buffers of `size` bytes; with a ledger, fewer where it has no room for so many, but at least one.
    ///
    /// # Errors
    /// [`Error::NoRoom`].
    pub(crate) fn new(size: usize, most: usize, ledger: Option<&Arc<Ledger>>) -> Result<Slots, Error> {
        let mut count = most;
        let held = loop {
            let Some(ledger) = ledger else { break None };
            match ledger.reserve(size * count) {
                Some(held) => break Some(held),
                None if count > 1 => count /= 2,
                None => {
                    let all = ledger.stats();
                    return Err(Error::NoRoom(format!(
                        "a bounce buffer of {size} bytes, for memory the device cannot reach, does not fit into the \
                         host memory of the node: of {} bytes {} are reserved; free some buffers, raise the cap or \
                         lower block_size",
                        all.capacity, all.reserved,
                    )));
                }
            }
        };
        Ok(Slots { region: Region::new(size * count, None, held)?, size, free: (0..count).collect() })
    }
}

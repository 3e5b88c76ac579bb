//! Bounce buffers of a worker.

use crate::error::Error;
use crate::memory::Region;

/// Aligned buffers for what cannot travel in place.
pub(crate) struct Slots {
    pub(crate) region: Region,
    /// Of each, in bytes.
    pub(crate) size: usize,
    /// Numbers of those that nobody uses.
    pub(crate) free: Vec<usize>,
}

impl Slots {
    /// `count` buffers of `size` bytes.
    ///
    /// # Errors
    /// [`Error::NoRoom`].
    pub(crate) fn new(size: usize, count: usize) -> Result<Slots, Error> {
        Ok(Slots { region: Region::new(size * count, None, None)?, size, free: (0..count).collect() })
    }
}

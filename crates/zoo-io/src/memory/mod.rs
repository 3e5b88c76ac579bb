//! Memory that devices reach without a copy: aligned, optionally page-locked, in a bounded pool.

mod ledger;
mod page_lock;
mod pool;
mod region;
mod returning;

pub use ledger::{Ledger, LedgerStats, Reservation};
pub use page_lock::{PageLock, cuda};
pub(crate) use page_lock::{cuda_names, open_first};
pub use pool::{Pool, PoolBuffer, PoolStats};
pub use region::Region;
pub(crate) use region::{Home, Mapping, dropped_so_far, find, is_live, pin, wait_until_gone};
pub(crate) use returning::Returning;

/// Buffers start at multiples of this: a page, which satisfies every device.
pub const BUFFER_ALIGNMENT: usize = 4096;
/// Regions start at multiples of this, so that the kernel can back them with huge pages.
pub const HUGE_PAGE: usize = 2 << 20;

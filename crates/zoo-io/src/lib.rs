//! Asynchronous file and NVMe I/O for tensors: bytes, offsets, alignment, and nothing about tensors themselves.
//!
//! An [`Engine`] has workers; a worker has a backend (io_uring, blocking threads, or a mock that misbehaves on order) and
//! keeps its queue full. An operation ([`Request`]) moves one buffer from or to a range of a file or of several striped
//! ones ([`Target`]); it is cut into blocks ([`plan`]) that travel past the page cache in place, past it by way of a
//! bounce buffer, or through it; bytes in the memory of a GPU by GPUDirect Storage. The buffer belongs to the operation until it is over and always comes back.
//!
//! [`small_sums`] are all-reduces of processes that share memory.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod align;
mod backend;
mod bounce;
pub mod checksum;
mod copy;
mod driver;
#[cfg(test)]
#[cfg(not(feature = "loom"))]
mod dying;
mod engine;
pub mod error;
pub mod file;
mod gds;
pub mod memory;
mod op;
pub mod plan;
mod process;
mod queue;
pub mod small_sums;
mod sync;
mod sys;

pub use backend::mock::{Fault, FaultKind, MockPlan};
pub use backend::uring::RingOptions;
pub use engine::{BackendChoice, Engine, Settings, Stats};
pub use error::{Direction, Error};
pub use file::{DirectMode, File, Target};
pub use gds::{Gpu, Registration};
pub use memory::{Ledger, Pool, PoolBuffer};
pub use op::{Buffer, Done, Report, Request, Ticket};
pub use sys::EventFd;

/// Version of this crate.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

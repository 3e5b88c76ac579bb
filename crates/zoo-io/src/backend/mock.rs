//! A device that misbehaves on order: deterministic from a seed and from what each transfer is.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Backend, Event, Kind, Transfer, Wait};
use crate::error::Direction;
use crate::sync::Alarm;

/// What happens to a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// The kernel's errno, such as `EIO` or `ENOSPC`; nothing is moved.
    Errno(i32),
    /// Only this many bytes are moved.
    Short(usize),
    /// It takes this long.
    Delay(Duration),
}

/// Which transfers it happens to: those of one direction that touch a range of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// `None` is either.
    pub direction: Option<Direction>,
    /// First byte, in the file.
    pub offset: u64,
    /// Length of the range; `u64::MAX` reaches to the end.
    pub len: u64,
    /// How often; `None` is always.
    pub times: Option<u32>,
    /// What happens.
    pub what: FaultKind,
}

/// A plan of misfortunes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MockPlan {
    /// Decides the order of completions and the random short transfers.
    pub seed: u64,
    /// Whether transfers complete in another order than they were begun in.
    pub reorder: bool,
    /// Of 256 transfers, so many are short at random.
    pub short: u8,
    /// Named misfortunes; the first that fits happens.
    pub faults: Vec<Fault>,
}

/// What all workers of one engine share: how often each fault may still happen.
pub(crate) type SharedPlan = Arc<Mutex<MockPlan>>;

pub(crate) struct Mock {
    alarm: Arc<Alarm>,
    plan: SharedPlan,
    depth: usize,
    held: Vec<Transfer>,
    random: u64,
}

impl Mock {
    pub(crate) fn new(plan: SharedPlan, depth: usize, worker: usize, alarm: Arc<Alarm>) -> Self {
        let seed = plan.lock().unwrap_or_else(PoisonError::into_inner).seed;
        Mock {
            alarm,
            plan,
            depth,
            held: Vec::new(),
            random: seed ^ (worker as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15),
        }
    }

    /// SplitMix64 (Steele, Lea, Flood 2014).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn next_fault(&mut self, transfer: &Transfer) -> Option<FaultKind> {
        let random = self.random();
        let direction = match transfer.kind {
            Kind::Read => Direction::Read,
            // A device that refuses to write refuses to flush.
            Kind::Write | Kind::Sync => Direction::Write,
        };
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let end = transfer.offset.saturating_add(transfer.len as u64);
        let fits = |fault: &&mut Fault| {
            fault.times != Some(0)
                && fault.direction.is_none_or(|d| d == direction)
                && transfer.offset < fault.offset.saturating_add(fault.len)
                && end > fault.offset
        };
        if let Some(fault) = plan.faults.iter_mut().find(fits) {
            fault.times = fault.times.map(|times| times - 1);
            return Some(fault.what);
        }
        let short = transfer.kind != Kind::Sync && random % 256 < u64::from(plan.short);
        short.then(|| FaultKind::Short((random >> 8) as usize % transfer.len.max(1)))
    }

    fn complete(&mut self, mut transfer: Transfer) -> Event {
        let result = match self.next_fault(&transfer) {
            Some(FaultKind::Errno(errno)) => Err(errno),
            Some(FaultKind::Short(len)) => {
                transfer.len = transfer.len.min(len);
                self.run_short(transfer)
            }
            Some(FaultKind::Delay(time)) => {
                std::thread::sleep(time);
                transfer.run()
            }
            None => transfer.run(),
        };
        Event { token: transfer.token, result }
    }

    /// A direct descriptor moves whole blocks only; a short transfer of it stops at one, as a device's would.
    fn run_short(&self, mut transfer: Transfer) -> Result<usize, i32> {
        if transfer.direct {
            transfer.len = transfer.len / 4096 * 4096;
        }
        if transfer.len == 0 { Err(libc::EINTR) } else { transfer.run() }
    }
}

impl Backend for Mock {
    fn depth(&self) -> usize {
        self.depth
    }

    fn push(&mut self, transfer: Transfer) {
        self.held.push(transfer);
    }

    fn turn(&mut self, wait: Wait, _in_flight: usize, events: &mut Vec<Event>) -> Result<(), String> {
        if self.held.is_empty() {
            if wait == Wait::Yes {
                self.alarm.sleep();
            }
            return Ok(());
        }
        let reorder = self.plan.lock().unwrap_or_else(PoisonError::into_inner).reorder;
        if wait == Wait::No && reorder && self.random().is_multiple_of(2) {
            return Ok(());
        }
        let count = if reorder { 1 + self.random() as usize % self.held.len() } else { self.held.len() };
        for _ in 0..count {
            let which = if reorder { self.random() as usize % self.held.len() } else { 0 };
            let transfer = self.held.remove(which);
            let event = self.complete(transfer);
            events.push(event);
        }
        Ok(())
    }
}

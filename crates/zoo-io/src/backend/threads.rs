//! Blocking `pread` and `pwrite`, one at a time a worker: what is left where io_uring is refused.

use std::sync::Arc;

use super::{Backend, Event, Transfer, Wait};
use crate::sync::Alarm;

pub(crate) struct Blocking {
    alarm: Arc<Alarm>,
    next: Option<Transfer>,
}

impl Blocking {
    pub(crate) fn new(alarm: Arc<Alarm>) -> Self {
        Blocking { alarm, next: None }
    }
}

impl Backend for Blocking {
    fn depth(&self) -> usize {
        1
    }

    fn push(&mut self, transfer: Transfer) {
        self.next = Some(transfer);
    }

    fn turn(&mut self, wait: Wait, _in_flight: usize, events: &mut Vec<Event>) -> Result<(), String> {
        match self.next.take() {
            Some(transfer) => events.push(Event { token: transfer.token, result: transfer.run() }),
            None if wait == Wait::Yes => self.alarm.sleep(),
            None => {}
        }
        Ok(())
    }
}

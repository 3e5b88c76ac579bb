//! What `loom` walks through: submitters, waiters, whoever aborts or closes, and workers that may die, around the life of
//! an operation. Only the device is made up; engine, driver, queue and operation are the real ones.

use std::collections::BTreeSet;
use std::sync::Arc;

use loom::thread;

use super::*;
use crate::backend::{Event, Transfer, Wait};
use crate::file::{DirectMode, File, Target};

const PAGE: usize = 4096;

/// Addresses that the device was given and has not answered. No lock of the model's: nothing is to happen in between.
type Given = Arc<std::sync::Mutex<BTreeSet<usize>>>;

/// Does what it is given in the next turn, or says then that it is gone.
struct Device {
    alarm: Arc<Alarm>,
    given: Given,
    held: Vec<Transfer>,
    dies: bool,
}

impl Backend for Device {
    fn depth(&self) -> usize {
        2
    }

    fn push(&mut self, transfer: Transfer) {
        self.given.lock().unwrap().insert(transfer.ptr as usize);
        self.held.push(transfer);
    }

    fn turn(&mut self, wait: Wait, _: usize, events: &mut Vec<Event>) -> Result<(), String> {
        if self.held.is_empty() {
            if wait == Wait::Yes {
                self.alarm.sleep();
            }
            return Ok(());
        }
        if self.dies {
            return Err("the device is gone".to_owned());
        }
        for transfer in self.held.drain(..) {
            self.given.lock().unwrap().remove(&(transfer.ptr as usize));
            events.push(Event { token: transfer.token, result: Ok(transfer.len) });
        }
        Ok(())
    }
}

/// An engine whose threads are the model's.
struct World {
    engine: Engine,
    given: Given,
    target: Target,
}

impl World {
    /// A write of so many pages, each a transfer.
    fn submit(&self, pages: usize) -> Result<Ticket, Error> {
        self.engine.submit(Request {
            direction: Direction::Write,
            target: self.target.clone(),
            offset: 0,
            buffer: Box::new(vec![0_u8; pages * PAGE]),
            checksum: false,
            expected: None,
            durable: false,
            urgent: false,
            whole: false,
        })
    }

    /// Wait for an operation; afterwards its memory is the caller's, unless the device has it.
    fn settle(&self, ticket: &Ticket) -> Result<(), Error> {
        let outcome = ticket.wait(None).unwrap();
        let buffer = ticket.take_buffer();
        match buffer {
            Some(mut buffer) => {
                let range = buffer.start() as usize..buffer.start() as usize + buffer.len();
                let given = self.given.lock().unwrap();
                assert!(given.range(range).next().is_none(), "memory came back while the device has it");
            }
            None => assert!(matches!(outcome, Err(Error::WorkerDied(_))), "lost memory: {outcome:?}"),
        }
        assert!(ticket.take_buffer().is_none(), "memory came back twice");
        outcome.map(drop)
    }
}

/// Every interleaving of `act` and the end of the engine with its workers, of which the first so many die, with at most two
/// involuntary switches (`LOOM_MAX_PREEMPTIONS=3`: some twenty seconds). loom reports whoever waits for ever.
fn model(workers: usize, dying: usize, act: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    std::fs::write(&path, [0; 4 * PAGE]).unwrap();
    let file = Arc::new(File::open(&path, Direction::Write, DirectMode::Never, false).unwrap());
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.check(move || {
        let settings = Settings { block_size: PAGE, ..Settings::default() };
        let engine = Engine::without_threads(&settings, "model", workers).unwrap();
        let world = Arc::new(World { engine, given: Given::default(), target: Target::single(Arc::clone(&file)) });
        let threads: Vec<_> = (0..workers)
            .map(|worker| {
                let (world, habits) = (Arc::clone(&world), settings.habits());
                thread::spawn(move || {
                    let given = Arc::clone(&world.given);
                    let make = move |_, alarm| {
                        Ok(Device { alarm, given: Arc::clone(&given), held: Vec::new(), dies: worker < dying })
                    };
                    work(&world.engine.shared, worker, habits, &make, &mpsc::channel().0);
                })
            })
            .collect();
        act(&world);
        world.engine.close();
        for thread in threads {
            thread.join().unwrap();
        }
        let report = world.engine.wait(None).unwrap();
        assert_eq!(report.in_flight, 0);
    });
}

#[test]
fn what_is_submitted_ends_and_its_memory_comes_back() {
    model(1, 0, |world| {
        let tickets = [2, 1].map(|pages| world.submit(pages).unwrap());
        for ticket in &tickets {
            world.settle(ticket).unwrap();
        }
        assert_eq!(world.engine.wait(None).unwrap().finished, 2);
    });
}

#[test]
fn two_workers_that_share_an_operation_end_it_once() {
    model(2, 0, |world| {
        let ticket = world.submit(2).unwrap();
        world.settle(&ticket).unwrap();
        let report = world.engine.wait(None).unwrap();
        assert_eq!((report.finished, report.failures.len()), (1, 0));
    });
}

#[test]
fn a_close_finishes_what_it_finds_and_refuses_the_rest() {
    model(1, 0, |world| {
        let other = Arc::clone(world);
        let submitter = thread::spawn(move || match other.submit(1) {
            Ok(ticket) => other.settle(&ticket).unwrap(),
            Err(error) => assert_eq!(error, Error::Closed),
        });
        world.engine.close();
        submitter.join().unwrap();
    });
}

#[test]
fn an_abort_ends_every_operation_once_done_or_cancelled() {
    model(1, 0, |world| {
        let ticket = world.submit(2).unwrap();
        let other = Arc::clone(world);
        let aborter = thread::spawn(move || other.engine.abort());
        let outcome = world.settle(&ticket);
        assert!(matches!(outcome, Ok(()) | Err(Error::Cancelled { .. })), "{outcome:?}");
        aborter.join().unwrap();
        let report = world.engine.wait(None).unwrap();
        // Told by its ticket, and not a second time by the engine.
        assert_eq!((report.finished, report.failures.len()), (1, 0));
    });
}

#[test]
fn a_worker_that_dies_tells_everybody_and_keeps_what_the_device_has() {
    model(1, 1, |world| {
        let tickets = [2, 1].map(|pages| world.submit(pages));
        for ticket in tickets.iter().flatten() {
            let outcome = world.settle(ticket);
            assert!(matches!(outcome, Err(Error::WorkerDied(_))), "{outcome:?}");
        }
        for refused in tickets.iter().filter_map(|ticket| ticket.as_ref().err()) {
            assert!(matches!(refused, Error::WorkerDied(_) | Error::Closed), "{refused:?}");
        }
        assert!(matches!(world.submit(1), Err(Error::WorkerDied(_))));
    });
}

#[test]
fn one_of_two_workers_dies_with_a_part_of_an_operation() {
    model(2, 1, |world| {
        let ticket = world.submit(2).unwrap();
        let outcome = world.settle(&ticket);
        assert!(matches!(outcome, Ok(()) | Err(Error::WorkerDied(_))), "{outcome:?}");
        let report = world.engine.wait(None).unwrap();
        assert_eq!((report.finished, report.failures.len()), (1, 0));
    });
}

//! What becomes of operations whose worker dies: everybody is told, and no memory that the kernel may have is freed.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;

use crate::backend::{Backend, Event, Kind, Transfer, Wait};
use crate::sync::Alarm;
use crate::{Buffer, DirectMode, Direction, Engine, Error, File, Request, Settings, Target, Ticket};

const PAGE: usize = 4096;
/// Who waits longer hangs: a panic alone takes seconds where a sanitizer looks on.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The ring says that it cannot go on.
    Refusal,
    /// A fault of the backend, with nothing in the worker's hand.
    Panic,
    /// A fault of the worker while it looks at an event.
    PanicInHand,
}

/// Token, address and length of what the "kernel" was given and whose event was not seen.
type Pieces = Vec<(u32, usize, usize)>;

/// Does its first transfers, keeps the next ones, and dies.
struct Dying {
    alarm: Arc<Alarm>,
    /// Of this worker, and of all.
    mine: Pieces,
    given: Arc<Mutex<Pieces>>,
    events: Vec<Event>,
    /// How many transfers are done before.
    healthy: usize,
    end: End,
}

impl Dying {
    /// What goes with this token is the kernel's no more.
    fn answer(&mut self, token: u32) {
        let given = &mut *self.given.lock().unwrap();
        for (_, address, _) in self.mine.extract_if(.., |piece| piece.0 == token) {
            given.retain(|&(_, other, _)| other != address);
        }
    }
}

impl Backend for Dying {
    fn depth(&self) -> usize {
        4
    }

    fn push(&mut self, transfer: Transfer) {
        if self.healthy > 0 || transfer.kind == Kind::Sync {
            self.healthy = self.healthy.saturating_sub(1);
            self.events.push(Event { token: transfer.token, result: transfer.run() });
        } else {
            self.mine.push((transfer.token, transfer.ptr as usize, transfer.len));
            self.given.lock().unwrap().push((transfer.token, transfer.ptr as usize, transfer.len));
        }
    }

    fn turn(&mut self, wait: Wait, _: usize, events: &mut Vec<Event>) -> Result<(), String> {
        if !self.events.is_empty() {
            if let Some(event) = self.events.iter().find(|event| event.result == Ok(usize::MAX)) {
                self.answer(event.token);
            }
            events.append(&mut self.events);
            return Ok(());
        }
        match (self.mine.first().copied(), self.end) {
            (None, _) => {
                if wait == Wait::Yes {
                    self.alarm.sleep();
                }
                Ok(())
            }
            (Some(_), _) if wait == Wait::No => Ok(()),
            (Some(_), End::Refusal) => Err("the device is gone".to_owned()),
            (Some(_), End::Panic) => panic!("the device is gone"),
            (Some((token, ..)), End::PanicInHand) => {
                self.answer(token);
                // A page, and for what is then left of two (which is begun at once) more bytes than there are numbers.
                events.push(Event { token, result: Ok(PAGE) });
                self.events.push(Event { token, result: Ok(usize::MAX) });
                Ok(())
            }
        }
    }
}

/// Two pages, counted while they live.
struct Counted(Vec<u8>, Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

// SAFETY: the vector's memory does not move with it, and is this buffer's alone.
unsafe impl Buffer for Counted {
    fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
}

fn read(engine: &Engine, path: &Path, alive: &Arc<AtomicUsize>) -> Result<Ticket, Error> {
    alive.fetch_add(1, Ordering::SeqCst);
    let file = Arc::new(File::open(path, Direction::Read, DirectMode::Never, false).unwrap());
    engine.submit(Request {
        direction: Direction::Read,
        target: Target::single(file),
        offset: 0,
        buffer: Box::new(Counted(vec![0; 2 * PAGE], Arc::clone(alive))),
        checksum: true,
        expected: None,
        durable: false,
        urgent: false,
        whole: false,
    })
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![Just(End::Refusal), Just(End::Panic), Just(End::PanicInHand)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, max_shrink_iters: 8, ..ProptestConfig::default() })]

    #[test]
    fn everybody_is_told_and_what_the_kernel_has_stays(
        end in end(), healthy in 0_usize..4, operations in 1_usize..8, workers in 1_usize..3, block in 1_usize..3,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, [5; 2 * PAGE]).unwrap();
        let (given, alive) = (Arc::new(Mutex::new(Pieces::new())), Arc::new(AtomicUsize::new(0)));
        let kernel = Arc::clone(&given);
        let settings = Settings { block_size: block * PAGE, ..Settings::default() };
        let engine = Engine::start(&settings, "dying", workers, move |_, alarm| {
            Ok(Dying { alarm, mine: Vec::new(), given: Arc::clone(&kernel), events: Vec::new(), healthy, end })
        }).unwrap();
        let tickets: Vec<_> = (0..operations).map(|_| read(&engine, &path, &alive)).collect();
        let mut ended = 0;
        for ticket in tickets.iter().flatten() {
            let outcome = ticket.wait(Some(PATIENCE));
            prop_assert!(outcome.is_some(), "a waiter hangs");
            let failed = matches!(outcome, Some(Err(Error::WorkerDied(_))));
            prop_assert!(failed || matches!(outcome, Some(Ok(_))), "{:?}", outcome);
            ended += usize::from(failed);
        }
        let report = engine.wait(Some(PATIENCE)).unwrap();
        prop_assert_eq!(report.in_flight, 0);
        if ended > 0 {
            // Refused at once or, where the worker is dying at this moment, told by its ticket, or done by the other one.
            let late = read(&engine, &path, &alive).and_then(|ticket| ticket.wait(Some(PATIENCE)).unwrap());
            let refused = matches!(late, Err(Error::WorkerDied(_) | Error::Closed));
            prop_assert!(refused || (late.is_ok() && workers > 1), "{:?}", late);
        }
        let mut returned: Vec<_> = tickets.iter().flatten().filter_map(Ticket::take_buffer).collect();
        let given = given.lock().unwrap().clone();
        for buffer in &mut returned {
            let (start, len) = (buffer.start() as usize, buffer.len());
            let inside = |&(_, address, _): &(u32, usize, usize)| (start..start + len).contains(&address);
            prop_assert!(!given.iter().any(inside), "memory of the kernel's came back");
        }
        drop((returned, tickets, engine));
        for &(_, address, len) in &given {
            // SAFETY: this is what is tested: the kernel comes late and the memory is still there.
            unsafe { std::ptr::write_bytes(address as *mut u8, 1, len) };
        }
        let kept = alive.load(Ordering::SeqCst);
        prop_assert!(given.is_empty() == (kept == 0) || end == End::PanicInHand, "{} of {}", kept, given.len());
        prop_assert!(kept <= operations);
    }
}

//! Random programs of operations against a model of the file, on a mock that misbehaves and on the real device.
//!
//! `ZOO_IO_PROGRAMS=10000 cargo test --release -p zoo-io --test programs` runs so many on each.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may; in a helper of a test clippy does not see that it is one.

use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use zoo_io::checksum::crc32c;
use zoo_io::{
    BackendChoice, Buffer, DirectMode, Direction, Engine, Error, Fault, FaultKind, File, MockPlan, Pool, Request,
    Settings, Target, Ticket,
};

/// Programs stay within the first bytes of the file.
const LARGEST: usize = 120_000;
const EIO: i32 = 5;

#[derive(Debug, Clone)]
enum Step {
    /// Begin it; where it would overlap with what is in flight, wait for that first.
    Move {
        write: bool,
        from: usize,
        len: usize,
        pooled: bool,
        urgent: bool,
        durable: bool,
    },
    /// Wait for one of those in flight.
    Wait(prop::sample::Index),
    /// Let go of a ticket; the wait for all tells how it went.
    Forget(prop::sample::Index),
    WaitForAll,
    /// Close the files and open them again.
    Reopen,
}

#[derive(Debug, Clone)]
struct Program {
    settings: Settings,
    files: usize,
    stripe: u64,
    direct: bool,
    kept: bool,
    steps: Vec<Step>,
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0_usize..LARGEST / 4096;
    let range = prop_oneof![
        (0..LARGEST, 0_usize..30_000),
        (page.clone(), 0_usize..8).prop_map(|(from, len)| (from * 4096, len * 4096)),
        (page, 0_usize..5_000).prop_map(|(from, len)| (from * 4096, len)),
    ];
    let movement = (any::<bool>(), range, any::<bool>(), any::<bool>(), prop::bool::weighted(0.1)).prop_map(
        |(write, (from, len), pooled, urgent, durable)| Step::Move {
            write,
            from,
            len: len.min(LARGEST - from),
            pooled,
            urgent,
            durable,
        },
    );
    prop_oneof![
        8 => movement,
        2 => any::<prop::sample::Index>().prop_map(Step::Wait),
        1 => any::<prop::sample::Index>().prop_map(Step::Forget),
        1 => Just(Step::WaitForAll),
        1 => Just(Step::Reopen),
    ]
}

fn mock() -> impl Strategy<Value = BackendChoice> {
    let fault = (0_u64..LARGEST as u64, 1_u64..5_000, 1_u32..3).prop_map(|(offset, len, times)| Fault {
        direction: None,
        offset,
        len,
        times: Some(times),
        what: FaultKind::Errno(EIO),
    });
    let faults = proptest::collection::vec(fault, 0..3);
    (any::<u64>(), any::<bool>(), 0_u8..120, faults)
        .prop_map(|(seed, reorder, short, faults)| BackendChoice::Mock(MockPlan { seed, reorder, short, faults }))
}

fn real() -> impl Strategy<Value = BackendChoice> {
    prop_oneof![3 => Just(BackendChoice::Auto), 1 => Just(BackendChoice::Threads)]
}

fn program(backend: impl Strategy<Value = BackendChoice>) -> impl Strategy<Value = Program> {
    let habits = (1_usize..6, 1_usize..7, 1_usize..4, any::<bool>(), any::<bool>());
    let place = (1_usize..4, 1_u64..5, any::<bool>(), any::<bool>());
    (backend, habits, place, proptest::collection::vec(step(), 1..30)).prop_map(
        |(backend, (blocks, depth, threads, single_submit, overlap_events), (files, stripe, direct, kept), steps)| {
            let settings = Settings {
                block_size: 4096 * blocks,
                queue_depth: depth,
                num_threads: threads,
                single_submit,
                overlap_events,
                bounce_bytes: 1 << 17,
                backend,
                ..Settings::default()
            };
            Program { settings, files, stripe: 4096 * stripe, direct, kept, steps }
        },
    )
}

/// An operation in flight.
struct Going {
    ticket: Option<Ticket>,
    range: Range<usize>,
    /// What is written; of a read nothing.
    written: Option<Vec<u8>>,
}

/// What the files must hold. A failed write leaves any mixture of what was there and what was to be written.
struct Model {
    bytes: Vec<u8>,
    unknown: Vec<bool>,
}

impl Model {
    fn check(&self, range: &Range<usize>, found: &[u8], what: &str) -> Result<(), TestCaseError> {
        for (at, byte) in range.clone().zip(found) {
            prop_assert!(self.unknown[at] || self.bytes[at] == *byte, "{} differs at byte {}", what, at);
        }
        Ok(())
    }

    /// Account for an operation that is over.
    fn end(&mut self, going: &Going, outcome: &Result<zoo_io::Done, Error>) -> Result<(), TestCaseError> {
        prop_assert!(matches!(outcome, Ok(_) | Err(Error::Os { errno: EIO, .. })), "{:?}", outcome);
        let buffer = going.ticket.as_ref().map(|ticket| ticket.take_buffer().expect("the buffer comes back"));
        let found = buffer.map(|mut buffer| {
            // SAFETY: the operation is over and the buffer is ours.
            unsafe { std::slice::from_raw_parts(buffer.start(), buffer.len()) }.to_vec()
        });
        match (&going.written, outcome) {
            (Some(written), Ok(done)) => {
                prop_assert_eq!(done.checksum, Some(crc32c(written)));
                prop_assert!(found.is_none_or(|found| found == *written), "a write leaves its buffer alone");
                self.bytes[going.range.clone()].copy_from_slice(written);
                self.unknown[going.range.clone()].fill(false);
            }
            (Some(_), Err(_)) => self.unknown[going.range.clone()].fill(true),
            (None, Ok(done)) => {
                if let Some(found) = found {
                    prop_assert_eq!(done.checksum, Some(crc32c(&found)));
                    self.check(&going.range, &found, "what was read")?;
                }
            }
            (None, Err(_)) => {}
        }
        Ok(())
    }
}

struct World<'a> {
    program: &'a Program,
    paths: Vec<std::path::PathBuf>,
    engine: Engine,
    pool: Arc<Pool>,
    model: Model,
    going: Vec<Going>,
    targets: [Target; 2],
}

fn open(program: &Program, paths: &[std::path::PathBuf]) -> [Target; 2] {
    let mode = if program.direct { DirectMode::Auto } else { DirectMode::Never };
    [Direction::Read, Direction::Write].map(|direction| {
        let files = paths.iter().map(|path| Arc::new(File::open(path, direction, mode, program.kept).unwrap()));
        Target::striped(files.collect(), program.stripe).unwrap()
    })
}

impl World<'_> {
    fn wait(&mut self, index: usize) -> Result<(), TestCaseError> {
        let going = self.going.swap_remove(index);
        let Some(ticket) = &going.ticket else {
            self.going.push(going);
            return self.wait_for_all();
        };
        let outcome = ticket.wait(Some(std::time::Duration::from_secs(60))).expect("no operation hangs");
        self.model.end(&going, &outcome)
    }

    fn wait_for_all(&mut self) -> Result<(), TestCaseError> {
        let report = self.engine.wait(None).unwrap();
        prop_assert!(report.failures.len() <= self.going.len());
        for going in std::mem::take(&mut self.going) {
            match &going.ticket {
                Some(ticket) => self.model.end(&going, &ticket.wait(None).unwrap())?,
                // Whether it failed is known only of all of them together.
                None if report.failures.is_empty() => {
                    if let Some(written) = &going.written {
                        self.model.bytes[going.range.clone()].copy_from_slice(written);
                        self.model.unknown[going.range.clone()].fill(false);
                    }
                }
                None if going.written.is_some() => self.model.unknown[going.range.clone()].fill(true),
                None => {}
            }
        }
        Ok(())
    }

    fn begin(&mut self, number: usize, step: &Step) -> Result<(), TestCaseError> {
        let &Step::Move { write, from, len, pooled, urgent, durable } = step else { return Ok(()) };
        let range = from..from + len;
        let collides = |going: &Going| {
            (write || going.written.is_some()) && going.range.start < range.end && range.start < going.range.end
        };
        while let Some(index) = self.going.iter().position(collides) {
            self.wait(index)?;
        }
        let content: Vec<u8> = (0..len).map(|k| ((k * 31 + number * 7919) >> 3) as u8).collect();
        let buffer: Box<dyn Buffer> = if pooled {
            let buffer = self.pool.take(len).unwrap();
            // SAFETY: the buffer has so many bytes, and they are ours.
            unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), buffer.start().as_ptr(), len) };
            Box::new(buffer)
        } else {
            Box::new(content.clone())
        };
        let direction = if write { Direction::Write } else { Direction::Read };
        let request = Request {
            direction,
            target: self.targets[usize::from(write)].clone(),
            offset: from as u64,
            buffer,
            checksum: true,
            expected: None,
            durable: durable && write,
            urgent,
            whole: false,
        };
        let ticket = Some(self.engine.submit(request).unwrap());
        self.going.push(Going { ticket, range, written: write.then_some(content) });
        Ok(())
    }
}

fn run(program: &Program) -> Result<(), TestCaseError> {
    // Not in /tmp, which may be memory: the folder of the build is on a disk.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths: Vec<_> = (0..program.files).map(|k| folder.path().join(format!("f{k}"))).collect();
    let size = LARGEST.next_multiple_of(program.files * program.stripe as usize);
    for path in &paths {
        std::fs::write(path, vec![0; size / program.files]).unwrap();
    }
    let mut world = World {
        program,
        targets: open(program, &paths),
        paths,
        engine: Engine::new(&program.settings).unwrap(),
        pool: Pool::with_segment(1 << 26, None, 1 << 18).unwrap(),
        model: Model { bytes: vec![0; size], unknown: vec![false; size] },
        going: Vec::new(),
    };
    for (number, step) in program.steps.iter().enumerate() {
        match step {
            Step::Move { .. } => world.begin(number, step)?,
            Step::Wait(which) if !world.going.is_empty() => world.wait(which.index(world.going.len()))?,
            Step::Forget(which) if !world.going.is_empty() => {
                let index = which.index(world.going.len());
                world.going[index].ticket = None;
            }
            Step::Wait(_) | Step::Forget(_) => {}
            Step::WaitForAll => world.wait_for_all()?,
            Step::Reopen => world.targets = open(world.program, &world.paths),
        }
    }
    world.wait_for_all()?;
    let report = world.engine.wait(None).unwrap();
    prop_assert!(report.failures.is_empty() && report.in_flight == 0);
    drop(world.engine);
    prop_assert_eq!(world.pool.stats().in_use, 0, "no buffer is lost");
    let files: Vec<_> = world.paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let stripe = program.stripe as usize;
    let found: Vec<u8> = (0..size)
        .map(|at| files[at / stripe % files.len()][at / stripe / files.len() * stripe + at % stripe])
        .collect();
    world.model.check(&(0..size), &found, "the file")
}

fn many(backend: impl Strategy<Value = BackendChoice>) {
    let cases = std::env::var("ZOO_IO_PROGRAMS").map_or(64, |number| number.parse().unwrap());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 400, ..Config::default() };
    TestRunner::new(config).run(&program(backend), |program| run(&program)).unwrap();
}

#[test]
fn programs_on_a_device_that_misbehaves_leave_what_the_model_has() {
    many(mock());
}

#[test]
fn programs_on_the_real_device_leave_what_the_model_has() {
    many(real());
}

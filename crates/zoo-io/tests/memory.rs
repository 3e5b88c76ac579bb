//! Pools, their ledger and rings together: what the kernel has pinned is in somebody's account, and nothing else is touched.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may; in a helper of a test clippy does not see that it is one.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use proptest::prelude::*;
use zoo_io::{DirectMode, Direction, Engine, Error, File, Ledger, Pool, PoolBuffer, Request, Settings, Target, Ticket};

const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// Pinned bytes are those of the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Bytes that the kernel has pinned for rings.
fn pinned() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().split(' ').next().unwrap().parse::<usize>().unwrap() * 1024
}

fn write(engine: &Engine, path: &Path, buffer: PoolBuffer, offset: u64) -> Ticket {
    let file = Arc::new(File::open(path, Direction::Write, DirectMode::Auto, false).unwrap());
    engine
        .submit(Request {
            direction: Direction::Write,
            target: Target::single(file),
            offset,
            buffer: Box::new(buffer),
            checksum: false,
            expected: None,
            durable: false,
            urgent: false,
            whole: false,
        })
        .unwrap()
}

/// Wait for it, and take the memory from the worker that may still have the operation in its hand.
fn end(ticket: &Ticket) {
    ticket.wait(None).unwrap().unwrap();
    drop(ticket.take_buffer());
}

struct World {
    folder: tempfile::TempDir,
    ledger: Arc<Ledger>,
    engine: Engine,
}

impl World {
    fn new(capacity: usize) -> World {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let ledger = Ledger::open(&folder.path().join("ledger"), capacity as u64).unwrap();
        let engine = Engine::new(&Settings { num_threads: 2, block_size: 65_536, ..Settings::default() }).unwrap();
        World { folder, ledger, engine }
    }

    fn pool(&self, segment: usize) -> Arc<Pool> {
        Pool::with_ledger(1 << 40, None, segment, Some(Arc::clone(&self.ledger))).unwrap()
    }

    fn write(&self, buffer: PoolBuffer) -> Ticket {
        write(&self.engine, &self.folder.path().join("f"), buffer, 0)
    }

    /// Whether rings register memory here.
    fn registers(&self) -> bool {
        self.engine.stats().fixed_transfers > 0
    }
}

#[test]
fn what_trim_gave_back_is_not_pinned_by_an_idle_ring() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = pinned();
    let world = World::new(8 * HUGE_PAGE);
    let pool = world.pool(4 * HUGE_PAGE);
    end(&world.write(pool.take(4 * HUGE_PAGE).unwrap()));
    assert!(!world.registers() || pinned() >= before + 4 * HUGE_PAGE);
    pool.trim();
    assert_eq!((pool.stats().reserved, world.ledger.stats().reserved, pinned()), (0, 0, before));
}

#[test]
fn a_buffer_waits_for_what_a_ring_still_has_instead_of_being_refused() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(4 * HUGE_PAGE);
    let pool = world.pool(HUGE_PAGE);
    for _ in 0..20 {
        // Either takes all there is, and cannot use the regions of the other.
        let small: Vec<_> = (0..4).map(|_| pool.take(HUGE_PAGE).unwrap()).collect();
        let tickets: Vec<_> = small.into_iter().map(|buffer| world.write(buffer)).collect();
        tickets.iter().for_each(end);
        end(&world.write(pool.take(4 * HUGE_PAGE).unwrap()));
    }
}

#[test]
fn a_buffer_waits_for_what_a_ring_still_has_of_another_pool() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(4 * HUGE_PAGE);
    let pools = [world.pool(HUGE_PAGE), world.pool(HUGE_PAGE)];
    for pool in pools.iter().cycle().take(40) {
        // All there is; what the other one gave up may still be registered.
        end(&world.write(pool.take(4 * HUGE_PAGE).unwrap()));
    }
}

#[test]
fn registering_touches_what_is_used_and_not_what_was_set_aside() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(1 << 30);
    let pool = world.pool(HUGE_PAGE);
    pool.set_aside(64 * HUGE_PAGE).unwrap();
    let buffer = pool.take(3 * PAGE).unwrap();
    let start = buffer.start().as_ptr();
    end(&world.write(buffer));
    let mut resident = vec![0_u8; 64 * HUGE_PAGE / PAGE];
    // SAFETY: the region that was set aside, which the first buffer begins, and one byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(start.cast(), 64 * HUGE_PAGE, resident.as_mut_ptr()) }, 0);
    let touched = resident.iter().filter(|page| **page & 1 == 1).count();
    assert!(touched * PAGE <= HUGE_PAGE, "{touched} pages");
}

#[test]
fn bounce_buffers_take_no_more_than_was_said() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("f");
    let file = |direction| Target::single(Arc::new(File::open(&path, direction, DirectMode::Auto, false).unwrap()));
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    for (bounce_bytes, queue_depth, most) in [(0, 64, 2), (1 << 20, 64, 16), (1 << 20, 3, 3), (1 << 20, 1, 1)] {
        let before = pinned();
        let settings = Settings { block_size: 65_536, bounce_bytes, queue_depth, ..Settings::default() };
        assert_eq!(settings.most_bounce_bytes(), most * 65_536);
        let engine = Engine::new(&settings).unwrap();
        let read = Request {
            direction: Direction::Read,
            target: file(Direction::Read),
            offset: 1,
            buffer: Box::new(vec![0; 500_000]),
            checksum: false,
            expected: None,
            durable: false,
            urgent: false,
            whole: false,
        };
        end(&engine.submit(read).unwrap());
        // What a ring has registered is counted by the kernel.
        assert!(pinned() - before <= most * 65_536, "{} bytes", pinned() - before);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pools_with_rings_stay_under_their_ledger_and_give_everything_back(
        pages in 2_usize..200,
        segment in 1_usize..64,
        actions in proptest::collection::vec((0_usize..2, 0_u8..8, 1_usize..60, any::<prop::sample::Index>()), 1..60),
    ) {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = pinned();
        let world = World::new(pages * PAGE);
        let pools = [world.pool(segment * PAGE), world.pool(segment * PAGE)];
        let mut held: [Vec<PoolBuffer>; 2] = Default::default();
        let mut tickets = Vec::new();
        for (who, action, len, which) in actions {
            match action {
                0..4 => match pools[who].take(len * PAGE) {
                    Ok(buffer) => held[who].push(buffer),
                    Err(Error::NoRoom(_)) => {
                        // Rings keep nothing from others that no pool has.
                        let taken = world.ledger.stats().reserved as usize;
                        prop_assert!(taken + len * PAGE > pages * PAGE, "{} of {}", taken / PAGE, pages);
                    }
                    Err(other) => prop_assert!(false, "{}", other),
                },
                4..6 if !held[who].is_empty() => {
                    let index = which.index(held[who].len());
                    let buffer = held[who].swap_remove(index);
                    tickets.push(world.write(buffer));
                }
                6 => tickets.drain(..).for_each(|ticket| end(&ticket)),
                _ => pools[who].trim(),
            }
            prop_assert!(world.ledger.stats().reserved as usize <= pages * PAGE);
        }
        drop(held);
        tickets.iter().for_each(end);
        pools.iter().for_each(|pool| pool.trim());
        prop_assert_eq!((world.ledger.stats().reserved, pinned()), (0, before));
        prop_assert!(world.ledger.stats().peak as usize <= pages * PAGE);
    }
}

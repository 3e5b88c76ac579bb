//! The engine against plain file I/O, on every backend, with and without misfortunes.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may; in a helper of a test clippy does not see that it is one.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use zoo_io::checksum::crc32c;
use zoo_io::{
    BackendChoice, Buffer, DirectMode, Direction, Engine, Error, Fault, FaultKind, File, MockPlan, Pool, Request,
    Settings, Target, Ticket,
};

/// Memory at a chosen distance from a page, counted while it lives.
struct Shifted {
    bytes: Vec<u8>,
    shift: usize,
    len: usize,
    alive: Arc<AtomicUsize>,
}

impl Shifted {
    fn new(content: &[u8], shift: usize, alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::SeqCst);
        let mut bytes = vec![0_u8; content.len() + 8192];
        let shift = bytes.as_ptr().align_offset(4096) + shift;
        bytes[shift..shift + content.len()].copy_from_slice(content);
        Shifted { bytes, shift, len: content.len(), alive: Arc::clone(alive) }
    }
}

impl Drop for Shifted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

// SAFETY: the vector's memory does not move with it.
unsafe impl Buffer for Shifted {
    fn start(&mut self) -> *mut u8 {
        self.bytes[self.shift..].as_mut_ptr()
    }
    fn len(&self) -> usize {
        self.len
    }
}

fn content(ticket: &Ticket) -> Vec<u8> {
    let mut buffer = ticket.take_buffer().expect("the buffer comes back");
    // SAFETY: the operation is over and the buffer is ours.
    unsafe { std::slice::from_raw_parts(buffer.start(), buffer.len()) }.to_vec()
}

fn request(direction: Direction, target: &Target, offset: u64, buffer: Shifted) -> Request {
    let buffer = Box::new(buffer);
    let target = target.clone();
    Request {
        direction,
        target,
        offset,
        buffer,
        checksum: true,
        expected: None,
        durable: false,
        urgent: false,
        whole: false,
    }
}

fn open(paths: &[std::path::PathBuf], direction: Direction, mode: DirectMode, stripe: u64, kept: bool) -> Target {
    let open = |path: &std::path::PathBuf| Arc::new(File::open(path, direction, mode, kept).unwrap());
    Target::striped(paths.iter().map(open).collect(), stripe).unwrap()
}

#[derive(Debug, Clone)]
struct Case {
    settings: Settings,
    files: usize,
    stripe: u64,
    direct: bool,
    kept: bool,
    writes: Vec<(u64, usize, usize)>,
    reads: Vec<(prop::sample::Index, prop::sample::Index, usize)>,
    durable: bool,
}

fn backend() -> impl Strategy<Value = BackendChoice> {
    prop_oneof![
        Just(BackendChoice::Auto),
        Just(BackendChoice::Threads),
        (any::<u64>(), any::<bool>(), any::<u8>()).prop_map(|(seed, reorder, short)| {
            BackendChoice::Mock(MockPlan { seed, reorder, short: short / 2, faults: vec![] })
        }),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let settings = (backend(), 1_usize..5, 1_usize..9, 1_usize..4, any::<(bool, bool)>(), 0_usize..100_000);
    let write = (0_u64..60_000, 0_usize..50_000, 0_usize..600);
    let reads = proptest::collection::vec(any::<(prop::sample::Index, prop::sample::Index, u8)>(), 1..8);
    let layout = (1_usize..4, 1_u64..6, any::<(bool, bool, bool)>());
    (settings, layout, proptest::collection::vec(write, 1..6), reads).prop_map(
        |((backend, block, depth, threads, (single, overlap), bounce), (files, stripe, flags), writes, reads)| Case {
            settings: Settings {
                block_size: block * 4096,
                queue_depth: depth,
                num_threads: threads,
                single_submit: single,
                overlap_events: overlap,
                bounce_bytes: bounce,
                backend,
                ..Settings::default()
            },
            files,
            stripe: stripe * 4096,
            direct: flags.0,
            kept: flags.1,
            durable: flags.2,
            writes,
            reads: reads.into_iter().map(|(a, b, shift)| (a, b, shift.into())).collect(),
        },
    )
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|k| ((k * 31 + seed * 7 + k / 251) % 253) as u8 + 1).collect()
}

/// What is in the files, put together as striping says, by plain reads.
fn by_plain_io(paths: &[std::path::PathBuf], stripe: u64, len: usize) -> Vec<u8> {
    let stripe = stripe as usize;
    let mut files: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    for file in &mut files {
        file.resize(len + stripe, 0);
    }
    (0..len)
        .map(|at| {
            let (row, within) = (at / stripe, at % stripe);
            files[row % paths.len()][row / paths.len() * stripe + within]
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reads_and_writes_do_what_plain_file_io_does(case in case()) {
        // Not in /tmp, which may be memory: the folder of the build is on a disk.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let paths: Vec<_> = (0..case.files).map(|k| folder.path().join(format!("f{k}"))).collect();
        let mode = if case.direct { DirectMode::Auto } else { DirectMode::Never };
        let engine = Engine::new(&case.settings).unwrap();
        let alive = Arc::new(AtomicUsize::new(0));

        // Writes that overlap go one after the other; the model is a vector.
        let mut model = Vec::new();
        let sink = open(&paths, Direction::Write, mode, case.stripe, case.kept);
        for (number, &(offset, len, shift)) in case.writes.iter().enumerate() {
            let bytes = pattern(len, number);
            let end = offset as usize + len;
            if len > 0 {
                model.resize(model.len().max(end), 0);
                model[offset as usize..end].copy_from_slice(&bytes);
            }
            let mut request = request(Direction::Write, &sink, offset, Shifted::new(&bytes, shift, &alive));
            request.durable = case.durable;
            let ticket = engine.submit(request).unwrap();
            let done = ticket.wait(None).unwrap().unwrap();
            prop_assert_eq!(done.num_bytes, len as u64);
            prop_assert_eq!(done.checksum, Some(crc32c(&bytes)));
            prop_assert_eq!(content(&ticket), bytes, "a write leaves its buffer alone");
        }
        prop_assert_eq!(by_plain_io(&paths, case.stripe, model.len()), model.clone());

        // Reads all at once.
        let source = open(&paths, Direction::Read, mode, case.stripe, case.kept);
        let known = source.size().unwrap().min(model.len() as u64) as usize;
        let tickets: Vec<_> = case.reads.iter().map(|(a, b, shift)| {
            let (a, b) = (a.index(known + 1), b.index(known + 1));
            let range = a.min(b)..a.max(b);
            let buffer = Shifted::new(&vec![0xEE; range.len()], *shift, &alive);
            (range.clone(), engine.submit(request(Direction::Read, &source, range.start as u64, buffer)).unwrap())
        }).collect();
        for (range, ticket) in tickets {
            let done = ticket.wait(None).unwrap().unwrap();
            prop_assert_eq!(done.checksum, Some(crc32c(&model[range.clone()])));
            prop_assert_eq!(&content(&ticket)[..], &model[range]);
        }
        let report = engine.wait(None).unwrap();
        prop_assert_eq!(report.finished as usize, case.writes.len() + case.reads.len());
        prop_assert!(report.failures.is_empty());
        let stats = engine.stats();
        prop_assert_eq!((stats.in_flight, stats.operations), (0, report.finished));
        drop(engine);
        prop_assert_eq!(alive.load(Ordering::SeqCst), 0, "no buffer is lost");
    }

    #[test]
    fn every_misfortune_is_told_once_and_no_operation_is_lost(
        seed: u64, reorder: bool, short in 0_u8..100, depth in 1_usize..6, threads in 1_usize..4,
        faults in proptest::collection::vec((0_u64..12, prop::sample::select(vec![libc_eio(), 28]), 1_u32..3), 0..4),
        operations in 1_usize..12,
    ) {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("f");
        let faults: Vec<_> = faults.into_iter().map(|(page, errno, times)| Fault {
            direction: None, offset: page * 4096, len: 1, times: Some(times), what: FaultKind::Errno(errno),
        }).collect();
        let settings = Settings {
            block_size: 4096, queue_depth: depth, num_threads: threads,
            backend: BackendChoice::Mock(MockPlan { seed, reorder, short, faults: faults.clone() }),
            ..Settings::default()
        };
        let engine = Engine::new(&settings).unwrap();
        let alive = Arc::new(AtomicUsize::new(0));
        let sink = open(std::slice::from_ref(&path), Direction::Write, DirectMode::Auto, 4096, false);
        let tickets: Vec<_> = (0..operations).map(|k| {
            let buffer = Shifted::new(&pattern(4096, k), 64 * (k % 3), &alive);
            engine.submit(request(Direction::Write, &sink, k as u64 * 4096, buffer)).unwrap()
        }).collect();
        // Half of them are asked, the others dropped: their failures must come with the wait for all.
        let mut told = 0;
        let mut failed = vec![false; operations];
        let mut dropped = 0;
        for (k, ticket) in tickets.into_iter().enumerate() {
            if k % 2 == 1 {
                dropped += 1;
                continue;
            }
            match ticket.wait(None).unwrap() {
                Ok(done) => prop_assert_eq!(done.num_bytes, 4096),
                Err(Error::Os { what, place, errno }) => {
                    prop_assert_eq!((what, place.offset, place.len), ("write", k as u64 * 4096, 4096));
                    prop_assert!(faults.iter().any(|f| f.offset == place.offset && f.what == FaultKind::Errno(errno)));
                    failed[k] = true;
                    told += 1;
                }
                Err(other) => prop_assert!(false, "unexpected {}", other),
            }
        }
        let report = engine.wait(None).unwrap();
        prop_assert_eq!(report.finished as usize, operations);
        prop_assert!(report.failures.len() <= dropped);
        for error in &report.failures {
            let Error::Os { place, .. } = error else { panic!("unexpected {error}") };
            prop_assert!(!std::mem::replace(&mut failed[(place.offset / 4096) as usize], true), "told twice");
        }
        let expected = (0..operations).filter(|k| faults.iter().any(|f| f.offset == *k as u64 * 4096)).count();
        prop_assert_eq!(told + report.failures.len(), expected);
        prop_assert!(engine.wait(None).unwrap().failures.is_empty());
        let bytes = std::fs::read(&path).unwrap();
        for (k, failed) in failed.into_iter().enumerate() {
            let here = bytes.get(k * 4096..(k + 1) * 4096);
            prop_assert!(failed || here == Some(&pattern(4096, k)[..]), "what succeeded is on the disk");
        }
        drop(engine);
        prop_assert_eq!(alive.load(Ordering::SeqCst), 0, "no buffer is lost");
    }
}

fn libc_eio() -> i32 {
    5
}

fn mock(faults: Vec<Fault>) -> Engine {
    let backend = BackendChoice::Mock(MockPlan { faults, ..MockPlan::default() });
    Engine::new(&Settings { block_size: 4096, backend, ..Settings::default() }).unwrap()
}

fn delay(times: u32) -> Fault {
    let what = FaultKind::Delay(Duration::from_millis(50));
    Fault { direction: None, offset: 0, len: u64::MAX, times: Some(times), what }
}

fn write_some(engine: &Engine, path: &Path, alive: &Arc<AtomicUsize>, count: u64) -> Vec<Ticket> {
    let target = Target::single(Arc::new(File::open(path, Direction::Write, DirectMode::Auto, false).unwrap()));
    (0..count)
        .map(|k| {
            let buffer = Shifted::new(&[7; 4096], 0, alive);
            engine.submit(request(Direction::Write, &target, k * 4096, buffer)).unwrap()
        })
        .collect()
}

#[test]
fn dropping_the_engine_finishes_what_was_submitted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    let alive = Arc::new(AtomicUsize::new(0));
    let engine = mock(vec![delay(3)]);
    drop(write_some(&engine, &path, &alive, 20));
    drop(engine);
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; 20 * 4096]);
    assert_eq!(alive.load(Ordering::SeqCst), 0);
}

#[test]
fn aborting_ends_every_ticket_and_frees_every_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    let alive = Arc::new(AtomicUsize::new(0));
    let engine = mock(vec![delay(4)]);
    let tickets = write_some(&engine, &path, &alive, 40);
    engine.abort();
    let outcomes: Vec<_> = tickets.iter().map(|ticket| ticket.wait(Some(Duration::from_secs(20))).unwrap()).collect();
    let cancelled = outcomes.iter().filter(|o| matches!(o, Err(Error::Cancelled { .. }))).count();
    assert!(cancelled > 0 && outcomes.iter().all(|o| o.is_ok() || matches!(o, Err(Error::Cancelled { .. }))));
    let again = File::open(&path, Direction::Write, DirectMode::Auto, false).unwrap();
    let buffer = Shifted::new(&[1; 10], 0, &alive);
    let refused = engine.submit(request(Direction::Write, &Target::single(Arc::new(again)), 0, buffer));
    assert_eq!(refused.err(), Some(Error::Closed));
    drop(tickets);
    drop(engine);
    assert_eq!(alive.load(Ordering::SeqCst), 0);
}

#[test]
fn what_is_urgent_begins_before_what_waits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    let alive = Arc::new(AtomicUsize::new(0));
    let backend = BackendChoice::Mock(MockPlan { faults: vec![delay(2)], ..MockPlan::default() });
    let engine = Engine::new(&Settings { block_size: 4096, queue_depth: 1, backend, ..Settings::default() }).unwrap();
    let target = Target::single(Arc::new(File::open(&path, Direction::Write, DirectMode::Auto, false).unwrap()));
    // All to the same place: the last one that began stays.
    let write = |value: u8, urgent: bool| {
        let buffer = Shifted::new(&[value; 8192], 0, &alive);
        engine.submit(Request { urgent, ..request(Direction::Write, &target, 0, buffer) }).unwrap()
    };
    let tickets = [write(1, false), write(2, false), write(3, true), write(4, true)];
    assert!(tickets.iter().all(|ticket| ticket.wait(None).unwrap().is_ok()));
    assert_eq!(std::fs::read(&path).unwrap(), vec![2; 8192]);
    engine.close();
}

#[test]
fn closing_one_file_disturbs_no_transfer_of_another() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, other) = (folder.path().join("f"), folder.path().join("other"));
    std::fs::write(&other, [0; 4096]).unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let engine = Engine::new(&Settings { queue_depth: 64, ..Settings::default() }).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                drop(File::open(&other, Direction::Read, DirectMode::Auto, true).unwrap());
            }
        });
        let target = Target::single(Arc::new(File::open(&path, Direction::Write, DirectMode::Auto, true).unwrap()));
        let write = |k: u64| {
            let buffer = Shifted::new(&[7; 4096], 0, &alive);
            engine.submit(request(Direction::Write, &target, k * 4096, buffer)).unwrap()
        };
        for _ in 0..100 {
            let tickets: Vec<_> = (0..64).map(write).collect();
            let outcomes: Vec<_> = tickets.iter().map(|ticket| ticket.wait(None).unwrap()).collect();
            let failed = outcomes.iter().find_map(|outcome| outcome.as_ref().err());
            if failed.is_some() {
                over.store(true, Ordering::Relaxed);
            }
            assert_eq!(failed, None);
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn reading_past_the_end_and_a_file_that_shrinks_say_where_it_ends() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("f");
    std::fs::write(&path, pattern(100_000, 0)).unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    for backend in [BackendChoice::Auto, BackendChoice::Threads, BackendChoice::Mock(MockPlan::default())] {
        for mode in [DirectMode::Auto, DirectMode::Never] {
            std::fs::write(&path, pattern(100_000, 0)).unwrap();
            let engine = Engine::new(&Settings { backend: backend.clone(), ..Settings::default() }).unwrap();
            let file = Arc::new(File::open(&path, Direction::Read, mode, false).unwrap());
            let target = Target::single(file);
            let past = engine.submit(request(Direction::Read, &target, 99_000, Shifted::new(&[0; 2000], 0, &alive)));
            assert!(matches!(past.err(), Some(Error::UnexpectedEnd { end: 100_000, .. })));
            // A file can only shrink between the check and the transfer if the transfer comes late.
            let late = Engine::new(&Settings {
                backend: BackendChoice::Mock(MockPlan { faults: vec![delay(1)], ..MockPlan::default() }),
                ..Settings::default()
            })
            .unwrap();
            let ticket =
                late.submit(request(Direction::Read, &target, 0, Shifted::new(&[0; 100_000], 64, &alive))).unwrap();
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(50_000).unwrap();
            let error = ticket.wait(None).unwrap().unwrap_err();
            assert!(matches!(error, Error::UnexpectedEnd { end: 50_000, .. }), "{error}");
        }
    }
}

#[test]
fn pool_memory_travels_in_place_and_registered() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("f");
    let engine = Engine::new(&Settings { block_size: 65_536, ..Settings::default() }).unwrap();
    let pool = Pool::new(8 << 20, None).unwrap();
    let file = Arc::new(File::open(&path, Direction::Write, DirectMode::Auto, true).unwrap());
    let is_direct = file.alignment().is_some();
    let buffer = pool.take(1 << 20).unwrap();
    // SAFETY: a megabyte of our own.
    unsafe { std::ptr::write_bytes(buffer.start().as_ptr(), 9, 1 << 20) };
    let target = Target::single(file);
    let ticket = engine
        .submit(Request {
            direction: Direction::Write,
            target,
            offset: 4096,
            buffer: Box::new(buffer),
            checksum: false,
            expected: None,
            durable: true,
            urgent: false,
            whole: false,
        })
        .unwrap();
    ticket.wait(None).unwrap().unwrap();
    let mut last = [0];
    std::fs::File::open(&path).unwrap().read_exact_at(&mut last, (1 << 20) + 4095).unwrap();
    assert_eq!(last, [9]);
    let stats = engine.stats();
    if is_direct && engine.backend() == "uring" {
        assert_eq!((stats.direct_bytes, stats.bounced_bytes, stats.buffered_bytes), (1 << 20, 0, 0));
        assert_eq!(stats.fixed_transfers, stats.transfers - 1, "all but the flush");
    }
    // Not by dropping the ticket: the worker may still have the operation in its hand.
    drop(ticket.take_buffer());
    assert_eq!(pool.stats().in_use, 0);
}

#[test]
fn settings_out_of_range_are_sentences() {
    for (settings, word) in [
        (Settings { block_size: 1000, ..Settings::default() }, "block_size = 1000"),
        (Settings { queue_depth: 0, ..Settings::default() }, "queue_depth = 0"),
        (Settings { num_threads: 65, ..Settings::default() }, "num_threads = 65"),
    ] {
        let error = Engine::new(&settings).err().unwrap();
        assert!(matches!(&error, Error::Invalid(text) if text.starts_with(word)), "{error}");
    }
}

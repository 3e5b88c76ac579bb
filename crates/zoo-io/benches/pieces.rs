//! The pieces of the engine, each alone: `make bench-rust`.
#![allow(clippy::unwrap_used, missing_docs)] // A benchmark may; criterion's macro writes an undocumented function.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use zoo_io::checksum::{combine, crc32c};
use zoo_io::plan::Plan;
use zoo_io::{BackendChoice, DirectMode, Direction, Engine, File, Pool, Request, Settings, Target};

fn checksums(c: &mut Criterion) {
    let mut group = c.benchmark_group("crc32c");
    for len in [4096_usize, 1 << 20, 1 << 26] {
        let bytes: Vec<u8> = (0..len).map(|k| k as u8).collect();
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(format!("{len} bytes"), |b| b.iter(|| crc32c(black_box(&bytes))));
    }
    group.finish();
    c.bench_function("crc32c of a concatenation", |b| b.iter(|| combine(black_box(1), black_box(2), 1 << 20)));
}

fn plans(c: &mut Criterion) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let open = |k: usize| {
        let path = folder.path().join(format!("f{k}"));
        Arc::new(File::open(&path, Direction::Write, DirectMode::Auto, false).unwrap())
    };
    let single = Target::single(open(0));
    let striped = Target::striped((0..4).map(open).collect(), 1 << 20).unwrap();
    for (name, target, base) in
        [("in place", &single, 1 << 20), ("bounced", &single, (1 << 20) + 64), ("striped", &striped, 1 << 20)]
    {
        // Per gibibyte: about a thousand chunks.
        let plan = Plan::new(Direction::Write, target, 100, 1 << 30, base, 1 << 20);
        c.bench_function(&format!("plan of 1 GiB, {name}"), |b| b.iter(|| black_box(plan.clone()).count()));
    }
}

fn pools(c: &mut Criterion) {
    let pool = Pool::new(1 << 30, None).unwrap();
    let held: Vec<_> = (1..200).map(|k| pool.take(k * 5000).unwrap()).collect();
    c.bench_function("take and drop a buffer beside 199 others", |b| b.iter(|| pool.take(black_box(1 << 20)).unwrap()));
    drop(held);
}

/// Host cost of one small operation: submit, wake, transfer, wake back.
fn operations(c: &mut Criterion) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("f");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let file = Arc::new(File::open(&path, Direction::Read, DirectMode::Never, true).unwrap());
    let target = Target::single(file);
    let request = |buffer: Vec<u8>| Request {
        direction: Direction::Read,
        target: target.clone(),
        offset: 0,
        buffer: Box::new(buffer),
        checksum: false,
        expected: None,
        durable: false,
        urgent: false,
        whole: false,
    };
    for backend in [BackendChoice::Auto, BackendChoice::Threads] {
        let engine = Engine::new(&Settings { backend, ..Settings::default() }).unwrap();
        let name = engine.backend();
        c.bench_function(&format!("read 4 KiB from the page cache and wait, {name}"), |b| {
            b.iter_batched(
                || vec![0; 4096],
                |buffer| engine.submit(request(buffer)).unwrap().wait(None).unwrap().unwrap(),
                BatchSize::SmallInput,
            );
        });
        c.bench_function(&format!("32 reads of 4 KiB at once, {name}"), |b| {
            b.iter_batched(
                || (0..32).map(|_| vec![0; 4096]).collect::<Vec<_>>(),
                |buffers| {
                    let tickets: Vec<_> =
                        buffers.into_iter().map(|buffer| engine.submit(request(buffer)).unwrap()).collect();
                    tickets.iter().for_each(|ticket| assert!(ticket.wait(None).unwrap().is_ok()));
                },
                BatchSize::SmallInput,
            );
        });
        engine.wait(None).unwrap();
    }
}

criterion_group! {
    name = pieces;
    config = Criterion::default().sample_size(30).measurement_time(std::time::Duration::from_secs(2));
    targets = checksums, plans, pools, operations
}
criterion_main!(pieces);

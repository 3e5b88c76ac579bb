//! GPUDirect Storage with a stand-in for cuFile, so that sanitizers see the whole path. What it does in detail is tested
//! from Python (tests/io/test_gds.py).
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may; in a helper of a test clippy does not see that it is one.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use zoo_io::{
    BackendChoice, Buffer, DirectMode, Direction, Engine, Error, File, Gpu, Request, Settings, Target, Ticket,
};

/// Memory that says it is a GPU's.
struct OnGpu(Vec<u8>);

// SAFETY: the vector's memory does not move with it, and is this buffer's alone.
unsafe impl Buffer for OnGpu {
    fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn gpu(&self) -> Option<Gpu> {
        Some(Gpu { device: 1, ready: 0 })
    }
}

fn submit(engine: &Engine, path: &Path, direction: Direction, buffer: Box<dyn Buffer>) -> Result<Ticket, Error> {
    let file = Arc::new(File::open(path, direction, DirectMode::Auto, false)?);
    let target = Target::single(file);
    engine.submit(Request {
        direction,
        target,
        offset: 100,
        buffer,
        checksum: false,
        expected: None,
        durable: direction == Direction::Write,
        urgent: false,
        whole: false,
    })
}

/// The one test of its process, because it sets variables of the environment.
#[test]
fn threads_write_and_read_memory_of_a_gpu() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let library = folder.path().join("libcufile_stub.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/io/cufile.c");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).arg("-lpthread").status();
    assert!(built.expect("a C compiler").success());
    for (name, value) in [("ZOO_CUFILE", &*library), ("ZOO_CUDART", &library), ("CUFILE_LOGFILE_PATH", Path::new(""))] {
        // SAFETY: no other thread is running yet that reads the environment.
        unsafe { std::env::set_var(name, value) };
    }
    let settings = Settings { backend: BackendChoice::Gds, block_size: 8192, queue_depth: 4, ..Settings::default() };
    let engine = Engine::new(&settings).unwrap();
    let known = engine.register(Box::new(OnGpu(vec![9; 4096]))).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3_u8 {
            let (engine, path) = (&engine, folder.path().join(thread.to_string()));
            scope.spawn(move || {
                for round in 0..10_u8 {
                    let bytes: Vec<u8> = (0..30_001_u32).map(|k| (k % 251) as u8 ^ thread ^ round).collect();
                    let write = submit(engine, &path, Direction::Write, Box::new(OnGpu(bytes.clone()))).unwrap();
                    assert_eq!(write.wait(None).unwrap().unwrap().num_bytes, 30_001);
                    let read = submit(engine, &path, Direction::Read, Box::new(OnGpu(vec![0; 30_001]))).unwrap();
                    read.wait(None).unwrap().unwrap();
                    let mut back = read.take_buffer().unwrap();
                    // SAFETY: the operation is over and the buffer is ours.
                    assert!(unsafe { std::slice::from_raw_parts(back.start(), back.len()) } == bytes);
                }
            });
        }
    });
    drop(known);
    let path = folder.path().join("0");
    let host = submit(&engine, &path, Direction::Read, Box::new(vec![0_u8; 10])).err().unwrap();
    assert!(host.to_string().contains("memory of the host"), "{host}");
    assert_eq!(engine.stats().gpu_bytes, 3 * 10 * 2 * 30_001);
    let ordinary = Engine::new(&Settings::default()).unwrap();
    let gpu = submit(&ordinary, &path, Direction::Read, Box::new(OnGpu(vec![0; 10]))).err().unwrap();
    assert!(gpu.to_string().contains("memory of a GPU for the backend"), "{gpu}");
}

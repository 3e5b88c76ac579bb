//! GPUDirect Storage: bytes between a device and the memory of a GPU, without host memory in between.
//!
//! NVIDIA's library for it, cuFile, is looked for when an engine wants it, and never linked. Its calls block, so each
//! transfer has a thread for itself, as those of blocking threads have. Signatures and numbers follow the cuFile API
//! reference guide (cufile.h).

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use libloading::{Library, Symbol};

use crate::memory::{cuda_names, open_first};
use crate::op::Buffer;
use crate::process::PerProcess;

/// What calls return by value: a code of cuFile's, and one of the CUDA driver's where that is to blame.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    code: c_int,
    cuda: c_int,
}

#[repr(C)]
union Descriptor {
    fd: c_int,
    _handle: *mut c_void,
}

/// What a file is registered by.
#[repr(C)]
struct Description {
    kind: c_int,
    descriptor: Descriptor,
    _operations: *const c_void,
}

/// A Linux file descriptor.
const OPAQUE_FD: c_int = 1;
/// Codes are larger than this; the kernel's numbers are smaller.
const BASE: i32 = 5000;
const CUDA_DRIVER_ERROR: c_int = BASE + 11;

type Call = unsafe extern "C" fn() -> Status;
type RegisterFile = unsafe extern "C" fn(*mut *mut c_void, *mut Description) -> Status;
type ForgetFile = unsafe extern "C" fn(*mut c_void);
type RegisterMemory = unsafe extern "C" fn(*const c_void, usize, c_int) -> Status;
type ForgetMemory = unsafe extern "C" fn(*const c_void) -> Status;
type Move = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, libc::off_t, libc::off_t) -> isize;
type CountDevices = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetDevice = unsafe extern "C" fn(*mut c_int) -> c_int;
type SetDevice = unsafe extern "C" fn(c_int) -> c_int;
type WaitFor = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Memory of a GPU, as a [`Buffer`] says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpu {
    /// Number of the GPU.
    pub device: i32,
    /// A `cudaEvent_t` that the GPU passes before the memory may be read or written; 0 for none.
    pub ready: usize,
}

/// What is called of the two libraries.
#[derive(Clone, Copy)]
struct Calls {
    open: Call,
    close: Call,
    register_file: RegisterFile,
    forget_file: ForgetFile,
    register_memory: RegisterMemory,
    forget_memory: ForgetMemory,
    read: Move,
    write: Move,
    count_devices: CountDevices,
    get_device: GetDevice,
    set_device: SetDevice,
    wait_for: WaitFor,
}

impl Calls {
    fn of(cufile: &Library, cuda: &Library) -> Result<Calls, String> {
        // SAFETY: the types are those of the libraries' C interfaces.
        unsafe {
            Ok(Calls {
                open: find(cufile, c"cuFileDriverOpen")?,
                close: find(cufile, c"cuFileDriverClose")?,
                register_file: find(cufile, c"cuFileHandleRegister")?,
                forget_file: find(cufile, c"cuFileHandleDeregister")?,
                register_memory: find(cufile, c"cuFileBufRegister")?,
                forget_memory: find(cufile, c"cuFileBufDeregister")?,
                read: find(cufile, c"cuFileRead")?,
                write: find(cufile, c"cuFileWrite")?,
                count_devices: find(cuda, c"cudaGetDeviceCount")?,
                get_device: find(cuda, c"cudaGetDevice")?,
                set_device: find(cuda, c"cudaSetDevice")?,
                wait_for: find(cuda, c"cudaEventSynchronize")?,
            })
        }
    }
}

/// # Safety
/// The function has the type `T`, and is called while the library is loaded.
unsafe fn find<T: Copy>(library: &Library, name: &CStr) -> Result<T, String> {
    // SAFETY: promised by the caller.
    let found: Result<Symbol<'_, T>, _> = unsafe { library.get(name) };
    let lacks = |error| format!("the cuFile library or the CUDA runtime lacks a function: {error}");
    found.map(|symbol| *symbol).map_err(lacks)
}

/// The library, with its driver open.
pub(crate) struct CuFile {
    calls: Calls,
    process: u32,
    /// Registered memory by its first address.
    registered: Mutex<BTreeMap<usize, Weak<Registration>>>,
    // Never unloaded: the function pointers come from them, and their threads may outlive the driver.
    _libraries: ManuallyDrop<[Library; 2]>,
}

impl fmt::Debug for CuFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CuFile")
    }
}

/// What a code means.
pub(crate) fn words(code: i32) -> String {
    let text = match code - BASE {
        1 => "the nvidia-fs driver is not loaded",
        2 | 3 => "a property is invalid or out of range",
        4 | 5 => "the version of the nvidia-fs driver does not fit, or cannot be read",
        6 => "the driver is being closed",
        7 => "GPUDirect Storage is not supported on this platform",
        8 => "GPUDirect Storage is not supported for this file: its file system or device has no way to the GPU",
        9 => "GPUDirect Storage is not supported by this GPU",
        10 => "the nvidia-fs driver failed",
        11 => "the CUDA driver failed",
        12..=15 => "the address is no memory of the GPU that is used, or goes past its end",
        16 | 17 => "the range cannot be mapped",
        18 | 19 => "the file is of a kind, or open in a way, that is not supported",
        20 => "the file is not open for direct transfers (O_DIRECT)",
        22 => "a value is invalid",
        23 => "the memory is registered already",
        24 => "the memory is not registered",
        25 => "permission denied",
        26 => "the driver is open already",
        27 => "the file is not registered",
        28 => "the file is registered already",
        29 => "the GPU was not found",
        30 => "an internal error",
        _ => "an error that zoo has no words for",
    };
    format!("{text} (cuFile {code})")
}

/// Whether a number that stands for an errno is one of cuFile's.
pub(crate) fn is_code(errno: i32) -> bool {
    errno > BASE
}

impl Status {
    fn check(self, what: &str) -> Result<(), String> {
        match self {
            Status { code: 0, .. } => Ok(()),
            Status { code: CUDA_DRIVER_ERROR, cuda } => {
                Err(format!("cuFile refused to {what}: {}, CUDA error {cuda}", words(CUDA_DRIVER_ERROR)))
            }
            Status { code, .. } => Err(format!("cuFile refused to {what}: {}", words(code))),
        }
    }
}

impl CuFile {
    fn load(names: &[String], runtime: &[String]) -> Result<CuFile, String> {
        let missing = |what: &str, names: &[String]| format!("no {what} was found (looked for {})", names.join(", "));
        let library = open_first(names).ok_or_else(|| missing("cuFile library", names))?;
        let cuda = open_first(runtime).ok_or_else(|| missing("CUDA runtime", runtime))?;
        let calls = Calls::of(&library, &cuda)?;
        // cuFile 1.17 never comes back from opening its driver where there is none of CUDA's.
        let mut devices = 0;
        // SAFETY: writes one number.
        let code = unsafe { (calls.count_devices)(&raw mut devices) };
        if code != 0 || devices == 0 {
            return Err(format!("the CUDA runtime finds no GPU (code {code})"));
        }
        // SAFETY: no memory is passed.
        unsafe { (calls.open)() }.check("open its driver")?;
        let (process, registered) = (std::process::id(), Mutex::default());
        Ok(CuFile { calls, process, registered, _libraries: ManuallyDrop::new([library, cuda]) })
    }

    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    fn registered(&self) -> MutexGuard<'_, BTreeMap<usize, Weak<Registration>>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Let cuFile know an open file.
    ///
    /// # Errors
    /// The sentence.
    pub(crate) fn register_file(self: &Arc<Self>, fd: RawFd) -> Result<FileHandle, String> {
        let mut raw = std::ptr::null_mut();
        let descriptor = Descriptor { fd };
        let mut description = Description { kind: OPAQUE_FD, descriptor, _operations: std::ptr::null() };
        // SAFETY: both are writable and of the type that is expected; the file is open.
        unsafe { (self.calls.register_file)(&raw mut raw, &raw mut description) }.check("register the file")?;
        Ok(FileHandle { cufile: Arc::clone(self), raw })
    }

    /// Let cuFile know memory of a GPU, so that its transfers need no memory of cuFile's own in between.
    ///
    /// # Errors
    /// The sentence.
    pub(crate) fn register_memory(self: &Arc<Self>, mut buffer: Box<dyn Buffer>) -> Result<Arc<Registration>, String> {
        let (start, len) = (buffer.start() as usize, buffer.len());
        let device = buffer.gpu().map_or(0, |gpu| gpu.device);
        // SAFETY: the memory stays where it is while the buffer lives, which the registration holds.
        let register = || unsafe { (self.calls.register_memory)(start as *const c_void, len, 0) };
        self.with_device(device, register).map_err(words)?.check(&format!("register {len} bytes"))?;
        let made = Registration { cufile: Arc::clone(self), start, len, device, _buffer: Mutex::new(buffer) };
        let made = Arc::new(made);
        self.registered().insert(start, Arc::downgrade(&made));
        Ok(made)
    }

    /// The registration that all of `[start, start + len)` lies in.
    pub(crate) fn registration_of(&self, start: usize, len: usize) -> Option<Arc<Registration>> {
        let found = self.registered().range(..=start).next_back()?.1.upgrade()?;
        (start + len <= found.start + found.len).then_some(found)
    }

    /// The GPU's context, for this thread.
    fn use_device(&self, device: i32) -> Result<(), i32> {
        // SAFETY: no memory is passed.
        if unsafe { (self.calls.set_device)(device) } == 0 { Ok(()) } else { Err(CUDA_DRIVER_ERROR) }
    }

    /// Do it in the GPU's context, on a thread that goes on in its own: it is a user's, whose tensors would else be made
    /// on another GPU from then on.
    fn with_device<T>(&self, device: i32, act: impl FnOnce() -> T) -> Result<T, i32> {
        let mut before = 0;
        // SAFETY: writes one number.
        let known = unsafe { (self.calls.get_device)(&raw mut before) } == 0;
        self.use_device(device)?;
        let done = act();
        if known {
            self.use_device(before)?;
        }
        Ok(done)
    }
}

impl Drop for CuFile {
    fn drop(&mut self) {
        // A forked process has a copy of this, and its parent's driver.
        if self.is_here() {
            // SAFETY: nobody uses it any more; a failure has nobody to be told.
            unsafe { (self.calls.close)() };
        }
    }
}

/// A file that cuFile knows.
#[derive(Debug)]
pub(crate) struct FileHandle {
    cufile: Arc<CuFile>,
    raw: *mut c_void,
}

// SAFETY: cuFile's calls may come from any thread.
unsafe impl Send for FileHandle {}
// SAFETY: as above.
unsafe impl Sync for FileHandle {}

impl Drop for FileHandle {
    fn drop(&mut self) {
        if self.cufile.is_here() {
            // SAFETY: registered once, and no transfer uses it any more: they hold it.
            unsafe { (self.cufile.calls.forget_file)(self.raw) };
        }
    }
}

/// Memory of a GPU that cuFile knows, until it is dropped and no transfer uses it any more.
#[derive(Debug)]
pub struct Registration {
    cufile: Arc<CuFile>,
    start: usize,
    len: usize,
    device: i32,
    // A lock because a buffer may be sent to another thread and not shared with one.
    _buffer: Mutex<Box<dyn Buffer>>,
}

impl fmt::Debug for Box<dyn Buffer> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

impl Registration {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never in use: cuFile registers no memory of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.cufile.is_here() {
            let mut registered = self.cufile.registered();
            if registered.get(&self.start).is_some_and(|other| other.strong_count() == 0) {
                registered.remove(&self.start);
            }
            drop(registered);
            // SAFETY: registered once; a failure has nobody to be told.
            let forget = || unsafe { (self.cufile.calls.forget_memory)(self.start as *const c_void) };
            let _ = self.cufile.with_device(self.device, forget);
        }
    }
}

/// What an operation on memory of a GPU needs: every file as cuFile knows it, and the memory if cuFile knows that.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) files: Vec<Arc<FileHandle>>,
    pub(crate) memory: Option<Arc<Registration>>,
    pub(crate) gpu: Gpu,
}

impl Route {
    /// Move `len` bytes between `ptr` and file number `file` at `offset`, now, on this thread: bytes moved, or an errno or a
    /// code of cuFile's.
    ///
    /// # Safety
    /// The memory is the GPU's, writable or readable, until this returns.
    pub(crate) unsafe fn run(
        &self,
        file: usize,
        write: bool,
        ptr: *mut u8,
        len: usize,
        offset: u64,
    ) -> Result<usize, i32> {
        let handle = &self.files[file];
        let cufile = &handle.cufile;
        cufile.use_device(self.gpu.device)?;
        // SAFETY: whoever named the event keeps it alive as long as the buffer.
        if self.gpu.ready != 0 && unsafe { (cufile.calls.wait_for)(self.gpu.ready as *mut c_void) } != 0 {
            return Err(CUDA_DRIVER_ERROR);
        }
        // cuFile finds registered memory by the address at which it begins.
        let base = self.memory.as_ref().map_or(ptr as usize, |memory| memory.start);
        let within = (ptr as usize - base) as libc::off_t;
        let call = if write { cufile.calls.write } else { cufile.calls.read };
        // SAFETY: promised by the caller.
        let moved = unsafe { call(handle.raw, base as *mut c_void, len, offset.cast_signed(), within) };
        match moved {
            0.. => Ok(moved.cast_unsigned()),
            -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
            _ => Err(i32::try_from(-moved).unwrap_or(libc::EIO)),
        }
    }
}

/// The library, with its driver open, or the sentence that says why it is not to be had. The driver is closed when nobody
/// uses it any more.
///
/// The environment variable `ZOO_CUFILE` names another library file.
///
/// # Errors
/// The sentence.
pub(crate) fn cufile() -> Result<Arc<CuFile>, String> {
    static OPEN: PerProcess<Mutex<Weak<CuFile>>> = PerProcess::new();
    let mut open = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cufile) = open.upgrade() {
        return Ok(cufile);
    }
    let names = match std::env::var("ZOO_CUFILE") {
        Ok(name) if !name.is_empty() => vec![name],
        _ => ["libcufile.so.0", "libcufile.so"].map(str::to_owned).to_vec(),
    };
    let made = Arc::new(CuFile::load(&names, &cuda_names())?);
    *open = Arc::downgrade(&made);
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_a_sentence_that_names_what_was_looked_for() {
        let [none, some] = [vec!["libzoo_no_such_library.so".to_owned()], vec!["libc.so.6".to_owned()]];
        let error = CuFile::load(&none, &some).unwrap_err();
        assert_eq!(error, "no cuFile library was found (looked for libzoo_no_such_library.so)");
        assert!(CuFile::load(&some, &none).unwrap_err().starts_with("no CUDA runtime was found"));
        assert!(CuFile::load(&some, &some).unwrap_err().contains("lacks a function"));
    }

    #[test]
    fn every_code_has_words_and_its_number() {
        for code in BASE..BASE + 60 {
            assert!(words(code).ends_with(&format!("(cuFile {code})")));
        }
        assert!(words(BASE + 20).contains("O_DIRECT"));
    }
}

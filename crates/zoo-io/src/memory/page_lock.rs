//! Page-locking through the CUDA runtime, which is looked for when it is first needed and never linked.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use libloading::os::unix;
use libloading::{Library, Symbol};

use crate::process::PerProcess;

/// Whoever can keep pages where they are, so that a GPU copies from and to them asynchronously.
pub trait PageLock: Debug + Send + Sync {
    /// Lock `len` bytes at `start`; the error is a sentence.
    ///
    /// # Errors
    /// What the runtime said.
    fn lock(&self, start: NonNull<u8>, len: usize) -> Result<(), String>;
    /// Undo it.
    fn unlock(&self, start: NonNull<u8>);
}

type HostRegister = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int;
type HostUnregister = unsafe extern "C" fn(*mut c_void) -> c_int;
type DeviceCount = unsafe extern "C" fn(*mut c_int) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

/// `cudaHostRegisterPortable`: locked for every context of the process.
const PORTABLE: c_uint = 1;

#[derive(Debug)]
struct Cuda {
    // Never unloaded: the function pointers come from it.
    _library: Library,
    register: HostRegister,
    unregister: HostUnregister,
    describe: ErrorString,
}

impl Cuda {
    fn sentence(&self, what: &str, code: c_int) -> String {
        // SAFETY: the runtime returns a static C string for every code.
        let text = unsafe { (self.describe)(code) };
        let text = if text.is_null() {
            "unknown error".to_owned()
        } else {
            // SAFETY: not null, and a C string by the runtime's contract.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        format!("the CUDA runtime refused to {what}: {text} (code {code})")
    }

    fn load(names: &[String]) -> Result<Cuda, String> {
        let library =
            open_first(names).ok_or_else(|| format!("no CUDA runtime was found (looked for {})", names.join(", ")))?;
        let symbol = |error: libloading::Error| format!("the CUDA runtime lacks a function: {error}");
        // SAFETY: the types are those of the CUDA runtime's C interface, stable since CUDA 4.
        let (count, register, unregister, describe) = unsafe {
            let count: Symbol<'_, DeviceCount> = library.get(c"cudaGetDeviceCount").map_err(symbol)?;
            let register: Symbol<'_, HostRegister> = library.get(c"cudaHostRegister").map_err(symbol)?;
            let unregister: Symbol<'_, HostUnregister> = library.get(c"cudaHostUnregister").map_err(symbol)?;
            let describe: Symbol<'_, ErrorString> = library.get(c"cudaGetErrorString").map_err(symbol)?;
            (*count, *register, *unregister, *describe)
        };
        let cuda = Cuda { _library: library, register, unregister, describe };
        let mut devices = 0;
        // SAFETY: writes one int.
        let code = unsafe { count(&raw mut devices) };
        if code != 0 {
            return Err(cuda.sentence("count devices", code));
        }
        if devices == 0 { Err("the CUDA runtime finds no device".to_owned()) } else { Ok(cuda) }
    }
}

/// The first of these libraries that is loaded already, and only if none is, the first that can be loaded: with a second
/// runtime beside that of torch, memory would be locked in a context that torch's copies know nothing of.
pub(crate) fn open_first(names: &[String]) -> Option<Library> {
    let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
    // SAFETY: nothing is loaded, so no constructor runs.
    let loaded = |name| unsafe { unix::Library::open(Some(name), flags | libc::RTLD_NOLOAD) }.ok();
    // SAFETY: loading the CUDA runtime runs its constructors, which is what it is made for.
    let fresh = |name| unsafe { unix::Library::open(Some(name), flags) }.ok();
    names.iter().find_map(loaded).or_else(|| names.iter().find_map(fresh)).map(Library::from)
}

impl PageLock for Cuda {
    fn lock(&self, start: NonNull<u8>, len: usize) -> Result<(), String> {
        // SAFETY: the memory is mapped and stays so until `unlock`.
        match unsafe { (self.register)(start.as_ptr().cast(), len, PORTABLE) } {
            0 => Ok(()),
            code => Err(self.sentence(&format!("lock {len} bytes"), code)),
        }
    }

    fn unlock(&self, start: NonNull<u8>) {
        // SAFETY: `start` was locked by `lock`. At process exit the runtime may be gone already; nobody can be told.
        unsafe { (self.unregister)(start.as_ptr().cast()) };
    }
}

/// Names that a CUDA runtime may have: that in `ZOO_CUDART`, or the usual ones.
pub(crate) fn cuda_names() -> Vec<String> {
    match std::env::var("ZOO_CUDART") {
        Ok(name) if !name.is_empty() => vec![name],
        _ => ["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"].map(str::to_owned).to_vec(),
    }
}

/// The CUDA runtime of this process, or the sentence that says why there is none. Looked for once.
///
/// The environment variable `ZOO_CUDART` names another library file. A runtime that is loaded already (torch brings its
/// own) is preferred to one that would have to be loaded, whatever their versions. A forked process looks anew: what its
/// parent found is of no use there, and may have been about to be found at the moment of the fork.
///
/// # Errors
/// The sentence.
pub fn cuda() -> Result<Arc<dyn PageLock>, String> {
    static FOUND: PerProcess<OnceLock<Result<Arc<dyn PageLock>, String>>> = PerProcess::new();
    FOUND.get().get_or_init(|| Cuda::load(&cuda_names()).map(|cuda| Arc::new(cuda) as Arc<dyn PageLock>)).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_runtime_is_a_sentence_that_names_what_was_looked_for() {
        let error = Cuda::load(&["libzoo_no_such_library.so".to_owned()]).unwrap_err();
        assert!(error.contains("libzoo_no_such_library.so"), "{error}");
    }

    #[test]
    fn a_library_that_is_loaded_already_comes_before_one_that_is_not() {
        // Of the C library's family, and used by nothing here.
        let names = ["libresolv.so.2", "libc.so.6"].map(str::to_owned);
        let is_loaded = |name: &str| {
            // SAFETY: nothing is loaded.
            unsafe { unix::Library::open(Some(name), libc::RTLD_NOW | libc::RTLD_NOLOAD) }.is_ok()
        };
        assert!(!is_loaded(&names[0]) && is_loaded(&names[1]));
        drop(open_first(&names).unwrap());
        assert!(!is_loaded(&names[0]), "the first one was loaded although the second was there");
        assert!(open_first(&names[..1]).is_some(), "where none is loaded the first that can be is");
    }

    #[test]
    fn a_library_without_the_functions_is_a_sentence() {
        let error = Cuda::load(&["libc.so.6".to_owned()]).unwrap_err();
        assert!(error.contains("lacks a function"), "{error}");
    }
}

//! Open files: one descriptor past the page cache where the file system allows it, one through it.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Direction, Error, errno_of};
use crate::gds::{CuFile, FileHandle};
use crate::sys::{self, DirectSupport, Later, Sort};

/// Whether transfers go past the page cache (`O_DIRECT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DirectMode {
    /// Where the file system allows it; otherwise buffered, which [`File::why_buffered`] explains.
    #[default]
    Auto,
    /// Or not at all: opening fails where it is refused.
    Always,
    /// Never.
    Never,
}

/// Direct transfers and buffered ones never share a page of the page cache: while one 512-byte sector of a page is
/// written past the cache and another through it, the cache could write an old copy of the first back over it.
const PAGE: u64 = 4096;
/// Network file systems report "blocks" of a mebibyte; no real device needs more than this.
const LARGEST_BLOCK: u64 = 65_536;

/// Alignments of direct transfers of one file, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Of addresses in memory.
    pub memory: u64,
    /// Of file offsets and lengths: a multiple of the device's, of the page and of the file system's block.
    pub offset: u64,
}

/// A file that is open for reading or for writing.
#[derive(Debug)]
pub struct File {
    path: Arc<Path>,
    id: u64,
    kept: bool,
    direction: Direction,
    /// What cuFile knows it by; goes before the descriptors do.
    gpu: Mutex<Option<Arc<FileHandle>>>,
    direct: Option<(OwnedFd, Alignment)>,
    buffered: Later,
    why_buffered: Option<String>,
    sort: Sort,
    /// Numbers that no other file has.
    identity: (u64, u64),
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);
static CLOSED: AtomicU64 = AtomicU64::new(0);

/// How many kept files were closed so far; rings look whether it moved and let go of what they registered.
pub(crate) fn closed_so_far() -> u64 {
    CLOSED.load(Ordering::Acquire)
}

impl File {
    /// Open `path`; for writing it is created when it is not there. Nothing is truncated.
    ///
    /// `kept` says that many operations will use this object, so that rings may register it.
    ///
    /// # Errors
    /// [`Error::Os`] from the kernel, [`Error::Invalid`] for folders and pipes, [`Error::Unavailable`] where direct
    /// transfers were demanded and are refused.
    pub fn open(path: &Path, direction: Direction, mode: DirectMode, kept: bool) -> Result<File, Error> {
        let shared: Arc<Path> = Arc::from(path);
        let mut file = File {
            path: Arc::clone(&shared),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            kept,
            direction,
            gpu: Mutex::default(),
            direct: None,
            buffered: Later::new(),
            why_buffered: None,
            sort: Sort::Other,
            identity: (0, 0),
        };
        if mode == DirectMode::Never {
            file.buffered_fd()?;
        } else {
            match file.open_direct() {
                Ok(pair) => file.direct = Some(pair),
                Err(Refusal::Error(error)) => return Err(error),
                Err(Refusal::NotHere(why)) if mode == DirectMode::Always => {
                    return Err(Error::Unavailable(format!(
                        "direct transfers of {} were demanded and are refused: {why}; \
                         use another file system or allow buffered transfers",
                        path.display()
                    )));
                }
                Err(Refusal::NotHere(why)) => {
                    file.buffered_fd()?;
                    file.why_buffered = Some(why);
                }
            }
        }
        (file.sort, file.identity) = sys::identify(file.any_fd()).map_err(|e| file.error("open", &e))?;
        if file.sort == Sort::Other {
            return Err(Error::Invalid(format!(
                "{} is neither a regular file nor a block device; offsets mean nothing there",
                path.display()
            )));
        }
        Ok(file)
    }

    fn flags(&self) -> libc::c_int {
        match self.direction {
            // A pipe must not make `open` wait for its other end; for regular files the flag means nothing.
            Direction::Read => libc::O_RDONLY | libc::O_NONBLOCK,
            Direction::Write => libc::O_WRONLY | libc::O_CREAT | libc::O_NONBLOCK,
        }
    }

    fn error(&self, what: &'static str, error: &std::io::Error) -> Error {
        if error.kind() == std::io::ErrorKind::InvalidInput && error.raw_os_error().is_none() {
            return Error::Invalid(format!("{:?}: {error}", self.path));
        }
        Error::os(what, &self.path, 0, 0, errno_of(error))
    }

    fn open_direct(&self) -> Result<(OwnedFd, Alignment), Refusal> {
        let fd = sys::open(&self.path, self.flags() | libc::O_DIRECT).map_err(|error| {
            if error.raw_os_error() == Some(libc::EINVAL) {
                Refusal::NotHere("the file system refuses O_DIRECT".to_owned())
            } else {
                Refusal::Error(self.error("open", &error))
            }
        })?;
        let raw = fd.as_raw_fd();
        let (memory, device) = match sys::direct_support(raw) {
            DirectSupport::Aligned { memory, offset } => (memory, offset),
            DirectSupport::No => {
                return Err(Refusal::NotHere("the file system reports no direct transfers".to_owned()));
            }
            // Every block device in use is content with a page.
            DirectSupport::Unknown => (PAGE, PAGE),
        };
        let block = sys::block_size(raw).min(LARGEST_BLOCK);
        let offset = device.max(PAGE).max(if block.is_power_of_two() { block } else { PAGE });
        if !offset.is_power_of_two() || !memory.is_power_of_two() || offset > LARGEST_BLOCK || memory > LARGEST_BLOCK {
            return Err(Refusal::NotHere(format!("it wants memory at multiples of {memory} and offsets of {device}")));
        }
        Ok((fd, Alignment { memory, offset }))
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// A number no other file of this process has.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whether rings may register it.
    pub(crate) fn kept(&self) -> bool {
        self.kept
    }

    /// Which way it was opened.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Alignments, when it is open for direct transfers.
    pub fn alignment(&self) -> Option<Alignment> {
        self.direct.as_ref().map(|(_, alignment)| *alignment)
    }

    /// Why a file that may be direct is not.
    pub fn why_buffered(&self) -> Option<&str> {
        self.why_buffered.as_deref()
    }

    pub(crate) fn direct_fd(&self) -> Option<RawFd> {
        self.direct.as_ref().map(|(fd, _)| fd.as_raw_fd())
    }

    /// The descriptor through the page cache; opened when first needed.
    pub(crate) fn buffered_fd(&self) -> Result<RawFd, Error> {
        if let Some(fd) = self.buffered.get() {
            return Ok(fd);
        }
        let fd = match &self.direct {
            Some((direct, _)) => self.open_again(direct.as_raw_fd()),
            None => sys::open(&self.path, self.flags()),
        }
        .map_err(|error| self.error("open", &error))?;
        Ok(self.buffered.keep(fd))
    }

    /// The same file even if it was removed, or another one was put in its place.
    fn open_again(&self, fd: RawFd) -> std::io::Result<OwnedFd> {
        let flags = self.flags() & !libc::O_CREAT;
        match sys::open(&PathBuf::from(format!("/proc/self/fd/{fd}")), flags) {
            // No /proc here: by its path, where that still leads to it.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let other = sys::open(&self.path, flags)?;
                if sys::identify(other.as_raw_fd())?.1 == self.identity { Ok(other) } else { Err(error) }
            }
            outcome => outcome,
        }
    }

    pub(crate) fn any_fd(&self) -> RawFd {
        self.direct_fd().or_else(|| self.buffered.get()).unwrap_or(-1)
    }

    /// What cuFile knows it by; the first call tells cuFile.
    pub(crate) fn for_gpu(&self, cufile: &Arc<CuFile>) -> Result<Arc<FileHandle>, Error> {
        let mut known = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = &*known {
            return Ok(Arc::clone(handle));
        }
        let made = cufile.register_file(self.any_fd()).map_err(|why| {
            Error::Unavailable(format!(
                "{} cannot be reached from a GPU: {why}; copy the tensor through a buffer in host memory",
                self.path.display()
            ))
        })?;
        Ok(Arc::clone(known.insert(Arc::new(made))))
    }

    /// Size in bytes, now.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn size(&self) -> Result<u64, Error> {
        sys::size(self.any_fd()).map_err(|error| self.error("open", &error))
    }

    /// Cut to `len` bytes when it is longer; never lengthen.
    ///
    /// # Errors
    /// [`Error::Os`]; [`Error::Invalid`] for a file that is open for reads and for a device.
    pub fn cut(&self, len: u64) -> Result<(), Error> {
        self.check_way(Direction::Write)?;
        if self.sort == Sort::Block {
            return Err(Error::Invalid(format!(
                "{} is a device, which holds more than what is written and cannot be cut; write a part of it (pwrite)",
                self.path.display()
            )));
        }
        if self.size()? > len { sys::truncate(self.any_fd(), len).map_err(|e| self.error("write", &e)) } else { Ok(()) }
    }

    /// # Errors
    /// [`Error::Invalid`]: it is open the other way.
    pub(crate) fn check_way(&self, wanted: Direction) -> Result<(), Error> {
        if self.direction == wanted {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "{} is open for {}s and cannot serve a {wanted}; open it again the other way",
            self.path.display(),
            self.direction,
        )))
    }

    /// Give `[offset, offset + len)` its space on the device before it is written.
    ///
    /// Writes that lengthen a file exclude each other in the file system, so a queue of them would run one by one; and a
    /// full disk is known before anything was written. File systems that cannot do it are left as they are.
    ///
    /// # Errors
    /// [`Error::Os`] with `allocate`: no space, quota or file size limit. The file keeps its size then.
    pub fn allocate(&self, offset: u64, len: u64) -> Result<(), Error> {
        let fd = self.any_fd();
        let end = offset + len;
        let old = self.size()?;
        if end <= old || len == 0 {
            return Ok(());
        }
        let from = offset.max(old);
        // Trying in vain would take all that is left, and ext4 gives back none of what lies past the end of a file but when
        // the file is cut: that may be to less than another writer has made of it meanwhile.
        let known = if end > sys::largest_file() {
            Some(libc::EFBIG)
        } else {
            sys::lacks_room(fd, from, end).then_some(libc::ENOSPC)
        };
        if let Some(errno) = known {
            return Err(Error::os("allocate", &self.path, offset, len, errno));
        }
        // First the space, which changes no size. The size follows only once all space is there, by an operation that
        // can lengthen but not shorten: another writer may have lengthened the file meanwhile.
        for mode in [libc::FALLOC_FL_KEEP_SIZE, 0] {
            match sys::fallocate(fd, mode, from, end - from) {
                Ok(()) => {}
                Err(error) => match errno_of(&error) {
                    libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV | libc::EPERM => return Ok(()),
                    errno => {
                        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                        let _ = sys::fallocate(fd, punch, from, end - from);
                        return Err(Error::os("allocate", &self.path, offset, len, errno));
                    }
                },
            }
        }
        Ok(())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if self.kept {
            CLOSED.fetch_add(1, Ordering::Release);
        }
    }
}

enum Refusal {
    NotHere(String),
    Error(Error),
}

/// Files that hold one byte sequence in turns (striping, RAID 0): stripe `k` is stripe `k / n` of file `k % n`.
///
/// ```text
/// logical:   0      s      2s     3s     4s
///            | A0   | B0   | A1   | B1   |       n = 2 files A and B, s = stripe size in bytes
/// ```
#[derive(Debug, Clone)]
pub struct Target {
    files: Arc<[Arc<File>]>,
    stripe: u64,
}

impl Target {
    /// One file, offsets as they are.
    pub fn single(file: Arc<File>) -> Self {
        Target { files: Arc::from([file]), stripe: u64::MAX }
    }

    /// Several files with stripes of `stripe` bytes, a multiple of 4096.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn striped(files: Vec<Arc<File>>, stripe: u64) -> Result<Self, Error> {
        match files.len() {
            0 => return Err(Error::Invalid("striping over no files; name at least one".to_owned())),
            1 => return Ok(Target { files: files.into(), stripe: u64::MAX }),
            _ => {}
        }
        if stripe == 0 || !stripe.is_multiple_of(PAGE) {
            return Err(Error::Invalid(format!(
                "stripes of {stripe} bytes; allowed are multiples of {PAGE}, such as 1048576"
            )));
        }
        let mut seen = BTreeMap::new();
        for file in &files {
            if let Some(other) = seen.insert(file.identity, file) {
                return Err(Error::Invalid(format!(
                    "striping over {} and {}, which are one file: stripes would lie on one another; name each file once",
                    other.path.display(),
                    file.path.display(),
                )));
            }
        }
        Ok(Target { files: files.into(), stripe })
    }

    /// The files, in order.
    pub fn files(&self) -> &[Arc<File>] {
        &self.files
    }

    /// Stripe size in bytes; `u64::MAX` for one file.
    pub fn stripe(&self) -> u64 {
        self.stripe
    }

    /// File, offset in it, and bytes until the stripe ends, of a logical offset.
    pub fn locate(&self, logical: u64) -> (usize, u64, u64) {
        locate(logical, self.files.len() as u64, self.stripe)
    }

    /// `[offset, offset + len)` as one range per file; a file without a part has an empty one.
    pub fn ranges(&self, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let files = self.files.len() as u64;
        (0..files)
            .map(|k| {
                let (from, to) = (share(offset, k, files, self.stripe), share(offset + len, k, files, self.stripe));
                (from, to - from)
            })
            .collect()
    }

    /// Logical size: bytes that can be read from the start without a gap.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn size(&self) -> Result<u64, Error> {
        let files = self.files.len() as u64;
        let mut end = u64::MAX;
        for (k, file) in (0_u64..).zip(self.files.iter()) {
            end = end.min(first_missing(file.size()?, k, files, self.stripe));
        }
        Ok(end)
    }
}

/// File, offset in it and bytes until the stripe ends, of a logical offset over `files` files.
pub(crate) fn locate(logical: u64, files: u64, stripe: u64) -> (usize, u64, u64) {
    let (row, within) = (logical / stripe, logical % stripe);
    let file = usize::try_from(row % files).unwrap_or(usize::MAX);
    (file, (row / files) * stripe + within, stripe - within)
}

/// Bytes of the first `logical` ones that lie in file `k`.
pub(crate) fn share(logical: u64, k: u64, files: u64, stripe: u64) -> u64 {
    let (row, within) = (logical / stripe, logical % stripe);
    let whole = row / files + u64::from(k < row % files);
    whole * stripe + if row % files == k { within } else { 0 }
}

/// Logical offset of the first byte that a file `k` of `size` bytes does not have.
fn first_missing(size: u64, k: u64, files: u64, stripe: u64) -> u64 {
    ((size / stripe) * files + k).saturating_mul(stripe).saturating_add(size % stripe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn striping_is_a_bijection_that_fills_every_file_from_its_start(
            files in 1_u64..5, stripe in 1_u64..9, len in 0_u64..200,
        ) {
            let mut next = vec![0_u64; files as usize];
            for logical in 0..len {
                let (file, offset, rest) = locate(logical, files, stripe);
                prop_assert_eq!(offset, next[file], "bytes of a file come in order, without gaps");
                prop_assert!(rest >= 1 && rest <= stripe);
                next[file] += 1;
            }
            for (k, count) in (0..files).zip(&next) {
                prop_assert_eq!(share(len, k, files, stripe), *count);
            }
            let end = (0..files).map(|k| first_missing(share(len, k, files, stripe), k, files, stripe)).min();
            prop_assert_eq!(end, Some(len));
        }
    }

    #[test]
    fn a_folder_a_pipe_and_a_missing_file_are_sentences() {
        let folder = tempfile::tempdir().unwrap();
        let missing = File::open(&folder.path().join("no"), Direction::Read, DirectMode::Auto, false).unwrap_err();
        assert!(missing.to_string().contains("No such file"), "{missing}");
        let is_folder = File::open(folder.path(), Direction::Read, DirectMode::Never, false).unwrap_err();
        assert!(matches!(is_folder, Error::Invalid(_)), "{is_folder}");
    }

    #[test]
    fn threads_that_need_the_page_cache_at_once_get_one_descriptor() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for number in 0..50 {
            let path = folder.path().join(number.to_string());
            let file = File::open(&path, Direction::Write, DirectMode::Auto, false).unwrap();
            let found = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| file.buffered_fd().unwrap())).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            assert!(found.iter().all(|&fd| fd == found[0]), "{found:?}");
            assert_eq!(sys::identify(found[0]).unwrap().1, file.identity);
        }
    }

    #[test]
    fn a_range_past_the_end_gets_space_and_size_and_the_bytes_before_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, b"abc").unwrap();
        let file = File::open(&path, Direction::Write, DirectMode::Auto, false).unwrap();
        file.allocate(1, 9).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abc\0\0\0\0\0\0\0");
        file.cut(4).unwrap();
        file.cut(400).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abc\0");
    }
}

//! Locks, flags and alarms of an operation's life: the system's, or `loom`'s, which walks through their interleavings.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize},
};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize},
};

#[cfg(not(all(test, feature = "loom")))]
pub(crate) use crate::sys::EventFd as Alarm;

/// What an eventfd does for a worker: a wake that comes first is kept.
#[cfg(all(test, feature = "loom"))]
#[derive(Debug)]
pub(crate) struct Alarm(Mutex<bool>, Condvar);

#[cfg(all(test, feature = "loom"))]
impl Alarm {
    pub(crate) fn new(_nonblocking: bool) -> std::io::Result<Self> {
        Ok(Alarm(Mutex::new(false), Condvar::new()))
    }

    pub(crate) fn wake(&self) {
        *lock(&self.0) = true;
        self.1.notify_one();
    }

    pub(crate) fn sleep(&self) {
        let mut rung = lock(&self.0);
        while !*rung {
            rung = self.1.wait(rung).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        *rung = false;
    }
}

#[cfg(all(test, feature = "loom"))]
impl std::os::fd::AsRawFd for Alarm {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        -1
    }
}

/// The state behind a lock is valid at every point, so a panic elsewhere does not matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

//! What a forked process has anew.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value of this process's own, made when it is first asked for.
///
/// For statics with locks: another thread may hold one at the moment of a fork, and the child, which has no such thread,
/// would wait for it for ever. The child gets a new value instead and never touches its parent's.
pub(crate) struct PerProcess<T>(AtomicPtr<Owned<T>>);

struct Owned<T> {
    process: u32,
    value: T,
}

impl<T: Default + Sync> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    pub(crate) fn get(&'static self) -> &'static T {
        let here = std::process::id();
        loop {
            let known = self.0.load(Ordering::Acquire);
            // SAFETY: null or from `Box::into_raw` below, and what was put there is never freed.
            if let Some(owned) = unsafe { known.as_ref() }
                && owned.process == here
            {
                return &owned.value;
            }
            let made = Box::into_raw(Box::new(Owned { process: here, value: T::default() }));
            if self.0.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: another thread was faster, and nobody has seen this one.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }
}

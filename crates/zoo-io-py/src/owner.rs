//! Python objects that keep memory alive, and the list in which they wait for the interpreter's lock.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::prelude::*;

/// An object that an operation keeps alive. It may be dropped on any thread; [`let_go`] does the rest.
///
/// PyO3 would put it on a list behind a lock then, and a process that forks at that moment has a child in which the lock
/// is held for ever: the first call of anything here would hang. This list needs none.
pub(crate) struct Owner(Option<Py<PyAny>>);

struct Node {
    object: Py<PyAny>,
    next: *mut Node,
}

static WAITING: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());

impl Owner {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Owner(Some(object))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        let mut head = WAITING.load(Ordering::Relaxed);
        let node = Box::into_raw(Box::new(Node { object, next: head }));
        while let Err(now) = WAITING.compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed) {
            head = now;
            // SAFETY: just made, and nobody has seen it yet.
            unsafe { (*node).next = head };
        }
    }
}

/// Let go of what waits; whatever frees memory, or needs some, calls it.
pub(crate) fn let_go(_: Python<'_>) {
    let mut next = WAITING.swap(ptr::null_mut(), Ordering::Acquire);
    while !next.is_null() {
        // SAFETY: made by `Box::into_raw`, and whoever took the list has it alone.
        let node = unsafe { Box::from_raw(next) };
        next = node.next;
        drop(node.object);
    }
}

//! The work queue between those who submit and the workers: who sleeps is woken exactly when there is something to do.
//!
//! A worker that finds nothing marks itself asleep under the same lock under which it looked, and whoever adds work
//! takes the marks under the lock under which it adds. So either the worker sees the work or the submitter sees the
//! sleeper; no third order exists. The `loom` test below walks through all of them.

use std::collections::VecDeque;

use crate::sync::{Mutex, MutexGuard, lock};

/// Something work items are taken from, one after the other.
pub(crate) trait Source {
    /// One piece of work.
    type Item;
    /// The next item, and whether it was the last one.
    fn take(&mut self) -> Option<(Self::Item, bool)>;
}

/// Workers to wake, as bits; whoever gets it must wake them after the lock is released.
pub(crate) type Sleepers = u64;
/// So many bits there are.
pub(crate) const MAX_WORKERS: usize = 64;

pub(crate) enum Taken<T> {
    Item(T),
    /// Nothing now; the worker is marked asleep and will be woken.
    Asleep,
    /// Nothing now and never again.
    Closed,
}

struct Inner<S> {
    urgent: VecDeque<S>,
    sources: VecDeque<S>,
    sleepers: Sleepers,
    closed: bool,
}

/// First in, first out, what is urgent before the rest; several workers may take from the head at the same time.
pub(crate) struct Queue<S> {
    inner: Mutex<Inner<S>>,
}

impl<S: Source> Queue<S> {
    pub(crate) fn new() -> Self {
        Queue {
            inner: Mutex::new(Inner { urgent: VecDeque::new(), sources: VecDeque::new(), sleepers: 0, closed: false }),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner<S>> {
        lock(&self.inner)
    }

    /// Add work for `wanted` workers at most; gives it back when the queue is closed.
    pub(crate) fn push(&self, source: S, wanted: usize, urgent: bool) -> Result<Sleepers, S> {
        let mut inner = self.inner();
        if inner.closed {
            return Err(source);
        }
        if urgent { &mut inner.urgent } else { &mut inner.sources }.push_back(source);
        let mut chosen = 0;
        for _ in 0..wanted {
            // The lowest bit that is set; zero when none is.
            let bit = inner.sleepers & inner.sleepers.wrapping_neg();
            inner.sleepers &= !bit;
            chosen |= bit;
        }
        Ok(chosen)
    }

    /// Take the next item, or be marked asleep.
    pub(crate) fn take_or_sleep(&self, worker: usize) -> Taken<S::Item> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        for line in [&mut inner.urgent, &mut inner.sources] {
            while let Some(source) = line.front_mut() {
                match source.take() {
                    Some((item, last)) => {
                        if last {
                            line.pop_front();
                        }
                        return Taken::Item(item);
                    }
                    None => {
                        line.pop_front();
                    }
                }
            }
        }
        if inner.closed {
            return Taken::Closed;
        }
        inner.sleepers |= 1 << worker;
        Taken::Asleep
    }

    /// Take no more; what is queued will still be done.
    pub(crate) fn close(&self) -> Sleepers {
        let mut inner = self.inner();
        inner.closed = true;
        std::mem::take(&mut inner.sleepers)
    }

    /// Take no more and hand out what nobody has begun.
    pub(crate) fn abort(&self) -> (Vec<S>, Sleepers) {
        let mut inner = self.inner();
        inner.closed = true;
        let mut left: Vec<S> = inner.urgent.drain(..).collect();
        left.extend(inner.sources.drain(..));
        (left, std::mem::take(&mut inner.sleepers))
    }

    /// Everybody who sleeps, to be woken for another reason than work.
    pub(crate) fn rouse(&self) -> Sleepers {
        std::mem::take(&mut self.inner().sleepers)
    }
}

#[cfg(test)]
#[cfg(feature = "loom")]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use crate::sync::Alarm;

    struct Count(usize);
    impl Source for Count {
        type Item = ();
        fn take(&mut self) -> Option<((), bool)> {
            self.0 = self.0.checked_sub(1)?;
            Some(((), self.0 == 0))
        }
    }

    fn ring(alarms: &[Alarm], sleepers: Sleepers) {
        for (worker, alarm) in alarms.iter().enumerate() {
            if sleepers & (1 << worker) != 0 {
                alarm.wake();
            }
        }
    }

    fn model(workers: usize, pushes: &'static [usize]) {
        let mut builder = loom::model::Builder::new();
        // All interleavings with so many involuntary switches; real faults of this kind need two or three.
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let queue = Arc::new(Queue::new());
            let alarms: Arc<Vec<Alarm>> = Arc::new((0..workers).map(|_| Alarm::new(false).unwrap()).collect());
            let done = Arc::new(AtomicUsize::new(0));
            let threads: Vec<_> = (0..workers)
                .map(|worker| {
                    let (queue, alarms, done) = (Arc::clone(&queue), Arc::clone(&alarms), Arc::clone(&done));
                    thread::spawn(move || {
                        loop {
                            match queue.take_or_sleep(worker) {
                                Taken::Item(()) => drop(done.fetch_add(1, Ordering::Relaxed)),
                                Taken::Asleep => alarms[worker].sleep(),
                                Taken::Closed => break,
                            }
                        }
                    })
                })
                .collect();
            for &count in pushes {
                ring(&alarms, queue.push(Count(count), count, count == 1).ok().unwrap());
            }
            ring(&alarms, queue.close());
            // A worker that missed a wake would make loom report a deadlock here.
            for thread in threads {
                thread.join().unwrap();
            }
            assert_eq!(done.load(Ordering::Relaxed), pushes.iter().sum::<usize>());
        });
    }

    #[test]
    fn one_worker_never_misses_work_or_the_end() {
        model(1, &[1, 2]);
    }

    #[test]
    fn two_workers_never_miss_work_or_the_end() {
        model(2, &[2]);
    }
}

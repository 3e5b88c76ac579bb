// Threads of the CPU kernels: OpenMP on the runtime that torch has loaded, as many as torch.get_num_threads() says.
//
// The library is compiled with -fopenmp but linked without an OpenMP runtime of its own: its symbols are found in the
// one that libtorch_cpu depends on, so that a process has one pool of threads and torch.set_num_threads() rules it.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "numbers.h"

namespace zoo {

constexpr int64_t GRAIN = 32768;  // elements; below that a thread costs more than it saves

// torch.get_num_threads(), which from now on is OpenMP's number in the calling thread too: a thread that is new to
// torch would have the number of the environment or of the processors.
int num_threads_of_torch();

static inline int num_threads_for(int64_t elements) {
  const int64_t wanted = elements / GRAIN;
  if (wanted <= 1) return 1;
#if defined(_OPENMP)
  const int64_t limit = omp_in_parallel() ? 1 : num_threads_of_torch();
#else
  const int64_t limit = 1;
#endif
  return int(wanted < limit ? wanted : limit);
}

// fn(begin, end) on equal parts of [0, count), cut at multiples of `unit`. `elements` decides the number of threads.
template <class Fn>
static inline void split_evenly(int64_t count, int64_t unit, int64_t elements, const Fn& fn) {
  const int threads = num_threads_for(elements);
  if (threads == 1) {
    fn(int64_t(0), count);
    return;
  }
#if defined(_OPENMP)
  const int64_t units = ceil_div(count, unit);
  // All threads are woken, as in torch's own regions, also where some have nothing to do: num_threads() would end
  // these, and the next region of torch would have to start others.
#pragma omp parallel
  {
    const int64_t here = omp_get_num_threads(), all = here < threads ? here : threads, me = omp_get_thread_num();
    if (me < all) {
      const int64_t begin = units * me / all * unit, end = units * (me + 1) / all * unit;
      if (begin < end) fn(begin, end < count ? end : count);
    }
  }
#endif
}

}  // namespace zoo

// The yardstick: a loop with the access pattern of AdamW, 28 bytes a parameter, and next to no arithmetic.
//
//   loop_fp32    reads p, g, m, v; writes p, m, v                                        4·(4 + 3) bytes
//   loop_mixed   reads g (bf16), p, m, v (fp32); writes p, m, v (fp32), o (bf16)         2 + 12 + 12 + 2 bytes
//
// Compiled for this very machine (-O3 -march=native), or for the instruction set that ZOO_KERNELS_ISA names. Rows are dealt out to threads by equal numbers of elements.
#include <cstdint>
#include <cstring>

struct Row {
  float *p, *m, *v;
  const void* g;
  uint16_t* o;
  int64_t n;
};

static void fp32(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    m[i] = 0.9f * m[i] + 0.1f * g[i];
    v[i] = 0.999f * v[i] + 0.001f * g[i];
    p[i] = p[i] - 1e-6f * (m[i] + v[i]);
  }
}

static void mixed(uint16_t* __restrict o, float* __restrict p, const uint16_t* __restrict g, float* __restrict m,
                  float* __restrict v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = uint32_t(g[i]) << 16;
    float x;
    memcpy(&x, &bits, 4);
    m[i] = 0.9f * m[i] + 0.1f * x;
    v[i] = 0.999f * v[i] + 0.001f * x;
    const float q = p[i] - 1e-6f * (m[i] + v[i]);
    p[i] = q;
    uint32_t out;
    memcpy(&out, &q, 4);
    o[i] = uint16_t(out >> 16);
  }
}

template <class F>
static void over(const Row* rows, int64_t count, int64_t threads, const F& f) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += rows[i].n;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t t = 0; t < threads; ++t) {
    const int64_t from = total * t / threads, to = total * (t + 1) / threads;
    int64_t first = 0;
    for (int64_t i = 0; i < count && first < to; first += rows[i].n, ++i) {
      const int64_t a = from > first ? from - first : 0, b = to - first < rows[i].n ? to - first : rows[i].n;
      if (a < b) f(rows[i], a, b - a);
    }
  }
}

extern "C" void loop_fp32(const Row* rows, int64_t count, int64_t threads) {
  over(rows, count, threads, [](const Row& r, int64_t a, int64_t n) {
    fp32(r.p + a, static_cast<const float*>(r.g) + a, r.m + a, r.v + a, n);
  });
}

extern "C" void loop_mixed(const Row* rows, int64_t count, int64_t threads) {
  over(rows, count, threads, [](const Row& r, int64_t a, int64_t n) {
    mixed(r.o + a, r.p + a, static_cast<const uint16_t*>(r.g) + a, r.m + a, r.v + a, n);
  });
}

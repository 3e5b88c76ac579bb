// Elementwise optimizers: one algebra.
//
//   g   <- σ·g             σ: grad_scale (unscaling, clipping, maximize)
//   g   <- g + λ·p         λ: coupled weight decay (flag COUPLED)
//   s'   = S(s, g)         the states of the rule, starting from zero
//   d    = D(s, s', g)     the direction
//   p'   = δ·p - η·d       δ: decoupled weight decay, 1 - lr·weight_decay; η: the step size
//
//   rule     states s    S                                     D                         η
//   ADAM     m, v (, x)  m + (1-β1)(g - m);  β2·v + (1-β2)g²   m / (ρ·√v + ε)            lr / (1-β1^t)
//   SGD      b           μ·b + (1-τ)·g                         b, or g + μ·b (NESTEROV)  lr
//   LION     m           β2·m + (1-β2)·g                       sign(β1·m + (1-β1)·g)     lr
//   ADAGRAD  h           h + g²                                g / (√h + ε)              lr / (1 + (t-1)·lr_decay)
//   LAMB     m, v        as ADAM                               κ·m / (ρ·√v + ε) + λ·p    lr·φ, κ = 1 / (1-β1^t)
//
// ρ = 1/√(1-β2^t). AMSGRAD: x' = max(x, v') takes the place of v in D. SGD without MOMENTUM keeps nothing, D = g. LAMB
// with EPS_INSIDE divides by √(ρ²·v + ε); φ is the trust ratio of the tensor, from the norms of p and d (two passes,
// below). Sources: Kingma and Ba 2015 (Adam), Loshchilov and Hutter 2019 (AdamW), Reddi et al. 2018 (AMSGrad), Chen et
// al. 2023 (Lion), Duchi et al. 2011 (Adagrad), You et al. 2020 (LAMB); SGD as in Sutskever et al. 2013 with PyTorch's
// dampening.
//
// All arithmetic is fp32, every operation rounded by itself in the order written here: no contraction into fused
// multiply-adds; NaN and infinity go where that arithmetic takes them. So the same sequence of tensor operations
// (reference.py) and every instruction set give the same bits. The scalars (σ, λ, δ, η and so on) are made in fp64, on
// the host (algebra.py) or, where only the device knows the learning rate, the step or a scale, there (make_scalars).
//
// Memory contract. A row is one tensor, or one flat shard of many: n elements, contiguous, at any address that is a
// multiple of the element's size. Rows do not overlap. Without a master, p is read from and written to `param` in its
// format. With a master (fp32), p is read from and written to `master`, and `param` only gets the rounded copy: one
// pass does the gradient's conversion, the update and the cast. Gradients are only read. States are fp32 or bf16.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   update_kernel 256 threads, <= 52 registers, >= 32 warps
//   scalars_kernel 256 threads, <= 37 registers, >= 48 warps
//   direction_kernel 256 threads, <= 64 registers, >= 32 warps
//   apply_kernel 256 threads, <= 34 registers, >= 48 warps
// Bytes an element of fp32: 12 and 8 for each state (AdamW 28); of 16 bits with a master 12 and 8 for each state. LAMB:
// 24 and 16. Arguments of a launch: 0.7 KB for up to 8 rows, else 32 KB (4 KB before CUDA 13).
#pragma once

#include "../common/isa.h"

#if !defined(__CUDACC__)
#include "../common/vectors.h"
#endif

#if defined(__CUDA_ARCH__)
#define ZOO_SQRT64(x) __dsqrt_rn(x)
#else
#define ZOO_SQRT64(x) __builtin_sqrt(x)
#endif

namespace zoo {

enum Rule : int32_t { ADAM = 0, SGD = 1, LION = 2, ADAGRAD = 3, LAMB = 4 };

enum Flag : int32_t { COUPLED = 1, AMSGRAD = 2, MOMENTUM = 4, NESTEROV = 8, EPS_INSIDE = 16 };

// In the order in which the binding takes them, as numbers of fp64 that are rounded to fp32 once.
struct Scalars {
  float grad_scale;   // σ
  float coupled;      // λ
  float decay;        // δ
  float rate;         // η
  float beta1;        // β1; μ of SGD
  float beta1_rest;   // 1 - β1; 1 - τ of SGD
  float beta2;        // β2
  float beta2_rest;   // 1 - β2
  float correction2;  // ρ = 1/√(1 - β2^t); with EPS_INSIDE 1/(1 - β2^t)
  float eps;          // ε
  float gain;         // κ
};
constexpr int NUM_SCALARS = 11;

// What an optimizer's options say of every step, in fp64, in the order in which the binding takes them.
struct Settings {
  double lr;
  double coupled, decoupled;  // weight decay: λ, and the part of δ = 1 - lr·decoupled
  double beta1, beta2, eps;
  double dampening;   // τ
  double lr_decay;    // of ADAGRAD
  double grad_scale;  // multiplies σ
  double corrected;   // 1: moments are corrected for their bias; 0: they are not
};
constexpr int NUM_SETTINGS = 10;

// A number on the device, fp32 or fp64; without an address there is none.
struct Number {
  const void* at;
  bool wide;
};

// A step of which only the device knows some numbers: it makes the scalars of update.h's table and counts the step.
struct Advance {
  int32_t rule, flags;
  Settings settings;
  Number lr;          // in the place of that of the settings
  Number grad_scale;  // multiplies σ
  Number loss_scale;  // divides σ
  Number found_inf;   // not 0: the step changes nothing and does not count
  float* steps;       // those taken before, of each parameter and all alike; one more afterwards
  int64_t num_steps;
  double* scalars;  // NUM_SCALARS of them, then 1 where the step changes nothing, else 0
};

constexpr int MAX_STATES = 3;

struct Row {
  void* param;
  const void* grad;
  void* state[MAX_STATES];
  void* master;
  int64_t n;
  float ratio;  // multiplies η: the trust ratio, 1 where there is none
};

struct Formats {
  Dtype param, grad, state;
};

// The number of states of a rule.
ZOO_HD int num_states(int rule, int flags) {
  if (rule == SGD) return (flags & MOMENTUM) ? 1 : 0;
  if (rule == ADAM) return (flags & AMSGRAD) ? 3 : 2;
  return rule == LAMB ? 2 : 1;
}

inline namespace ZOO_ISA {

ZOO_HD Scalars rounded(const double* v) {
  return {float(v[0]), float(v[1]), float(v[2]), float(v[3]), float(v[4]), float(v[5]),
          float(v[6]), float(v[7]), float(v[8]), float(v[9]), float(v[10])};
}

ZOO_HD double value_of(const Number& n, double without) {
  if (n.at == nullptr) return without;
  return n.wide ? *static_cast<const double*>(n.at) : double(*static_cast<const float*>(n.at));
}

// base^n by squaring: one sequence of roundings, where the pow() of libraries have their own.
ZOO_HD double power(double base, int64_t n) {
  double result = 1;
  for (; n > 0; n >>= 1) {
    if (n & 1) result = result * base;
    base = base * base;
  }
  return result;
}

// Writes the scalars of step `step`, which counts from 1, as algebra.py does. `scale`: σ.
ZOO_HD void write_scalars(int rule, int flags, const Settings& s, double lr, double scale, double step, double* v) {
  const bool is_sgd = rule == SGD;
  const double first = s.corrected != 0 ? 1 - power(s.beta1, int64_t(step)) : 1;
  const double second = s.corrected != 0 ? 1 - power(s.beta2, int64_t(step)) : 1;
  v[0] = scale;
  v[1] = s.coupled;
  v[2] = 1 - lr * s.decoupled;
  v[3] = rule == ADAM ? lr / first : rule == ADAGRAD ? lr / (1 + (step - 1) * s.lr_decay) : lr;
  v[4] = s.beta1;
  v[5] = is_sgd ? (step == 1 ? 1 : 1 - s.dampening) : 1 - s.beta1;
  v[6] = s.beta2;
  v[7] = 1 - s.beta2;
  v[8] = (flags & EPS_INSIDE) ? 1 / second : 1 / ZOO_SQRT64(second);
  v[9] = s.eps;
  v[10] = rule == LAMB ? 1 / first : 1;
}

// Writes the scalars of the step after those taken; whether the step is to change anything.
ZOO_HD bool make_scalars(const Advance& a) {
  const Settings& s = a.settings;
  const bool skips = value_of(a.found_inf, 0) != 0;
  const double scale = s.grad_scale * value_of(a.grad_scale, 1) / value_of(a.loss_scale, 1);
  write_scalars(a.rule, a.flags, s, value_of(a.lr, s.lr), scale, double(a.steps[0]) + 1, a.scalars);
  a.scalars[NUM_SCALARS] = skips ? 1 : 0;
  return !skips;
}

ZOO_HD float root_of(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// S of ADAM and LAMB. T here and below: float, or a vector of it.
template <class T>
ZOO_HD void advance_moments(const Scalars& c, T g, T& m, T& v) {
  m = m + c.beta1_rest * (g - m);
  v = c.beta2 * v + (c.beta2_rest * g) * g;
}

// D of ADAM (v may be the maximum of AMSGRAD) and of LAMB, from the states alone.
template <int RULE, int FLAGS, class T>
ZOO_HD T moment_direction(const Scalars& c, T p, T m, T v) {
  T d;
  if constexpr ((FLAGS & EPS_INSIDE) != 0) d = m / root_of(c.correction2 * v + c.eps);
  else d = m / (c.correction2 * root_of(v) + c.eps);
  if constexpr (RULE == LAMB) {
    d = c.gain * d;
    if constexpr ((FLAGS & COUPLED) != 0) d = d + c.coupled * p;
  }
  return d;
}

// One element: updates the states s0 to s2 and returns the direction. FLAGS and RULE are known to the compiler.
template <int RULE, int FLAGS, class T>
ZOO_HD T direction(const Scalars& c, T p, T g, T& s0, T& s1, T& s2) {
  if constexpr (RULE == ADAM || RULE == LAMB) {
    advance_moments(c, g, s0, s1);
    if constexpr ((FLAGS & AMSGRAD) == 0) return moment_direction<RULE, FLAGS>(c, p, s0, s1);
    s2 = ((s1 > s2) | (s1 != s1)) ? s1 : s2;
    return moment_direction<RULE, FLAGS>(c, p, s0, s2);
  } else if constexpr (RULE == SGD) {
    if constexpr ((FLAGS & MOMENTUM) == 0) return g;
    s0 = c.beta1 * s0 + c.beta1_rest * g;
    if constexpr ((FLAGS & NESTEROV) != 0) return g + c.beta1 * s0;
    else return s0;
  } else if constexpr (RULE == LION) {
    const T u = c.beta1 * s0 + c.beta1_rest * g, zero{};
    s0 = c.beta2 * s0 + c.beta2_rest * g;
    const T sign = u > 0.0f ? zero + 1.0f : u < 0.0f ? zero - 1.0f : zero;
    return u != u ? u : sign;  // a NaN must not pass for a zero
  } else {
    s0 = s0 + g * g;
    return g / (root_of(s0) + c.eps);
  }
}

// The gradient that the rule sees: σ·g, and + λ·p where the decay is coupled (LAMB adds it to the direction instead).
template <int RULE, int FLAGS, class T>
ZOO_HD T prepared(const Scalars& c, T p, T g) {
  g = c.grad_scale * g;
  if constexpr (RULE != LAMB && (FLAGS & COUPLED) != 0) g = g + c.coupled * p;
  return g;
}

// p' of one element.
template <int RULE, int FLAGS, class T>
ZOO_HD T updated(const Scalars& c, float rate, T p, T g, T& s0, T& s1, T& s2) {
  g = prepared<RULE, FLAGS>(c, p, g);
  const T d = direction<RULE, FLAGS>(c, p, g, s0, s1, s2);
  return c.decay * p - rate * d;
}

}  // namespace ZOO_ISA

// Calls f.template operator()<RULE, FLAGS>() for the combination; false if there is no such combination.
template <class F>
inline bool with_rule(int rule, int flags, const F& f) {
  switch (rule * 32 + flags) {
#define ZOO_CASE(RULE, FLAGS)                 \
  case (RULE) * 32 + (FLAGS):                 \
    f.template operator()<(RULE), (FLAGS)>(); \
    return true;
    ZOO_CASE(ADAM, 0)
    ZOO_CASE(ADAM, COUPLED)
    ZOO_CASE(ADAM, AMSGRAD)
    ZOO_CASE(ADAM, AMSGRAD + COUPLED)
    ZOO_CASE(SGD, 0)
    ZOO_CASE(SGD, COUPLED)
    ZOO_CASE(SGD, MOMENTUM)
    ZOO_CASE(SGD, MOMENTUM + COUPLED)
    ZOO_CASE(SGD, MOMENTUM + NESTEROV)
    ZOO_CASE(SGD, MOMENTUM + NESTEROV + COUPLED)
    ZOO_CASE(LION, 0)
    ZOO_CASE(ADAGRAD, 0)
    ZOO_CASE(ADAGRAD, COUPLED)
#undef ZOO_CASE
    default:
      return false;
  }
}

// On CUDA each takes `there` besides: the scalars in memory of the device, made by update_scalars, in the place of
// `scalars`; where they say that the step changes nothing, it changes nothing, and the norms of LAMB are 0. Null:
// `scalars` count.

// All rows; of a rule and flags that are known.
ZOO_CPU_KERNEL(update, int rule, int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows)
ZOO_CUDA_KERNEL(update, int rule, int flags, const Scalars& scalars, const double* there, Formats formats,
                const Row* rows, int64_t num_rows)

// Pass 1 of LAMB: norms[2·i] = Σp², norms[2·i + 1] = Σd² of row i. They are made of those of its parts, in order, and
// these of 16 lanes (common/lanes.h): they depend neither on the threads nor on CPU against CUDA. `parts`: two numbers
// for each part begun of every row (square_parts).
ZOO_CPU_KERNEL(lamb_direction, int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows,
               double* parts, double* norms)
ZOO_CUDA_KERNEL(lamb_direction, int flags, const Scalars& scalars, const double* there, Formats formats,
                const Row* rows, int64_t num_rows, double* parts, double* norms)

// Pass 2 of LAMB. `ratios`: the trust ratio of each row; that of the row itself is not looked at.
ZOO_CPU_KERNEL(lamb_apply, int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows,
               const float* ratios)
ZOO_CUDA_KERNEL(lamb_apply, int flags, const Scalars& scalars, const double* there, Formats formats, const Row* rows,
                int64_t num_rows, const float* ratios)

ZOO_KERNEL(update_scalars, const Advance& a)

// The kernels for CPUs as another library calls them (python.cpp): by the instruction set in use.
struct UpdateKernels {
  bool (*has_rule)(int rule, int flags);
  void (*update)(int rule, int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows);
};

}  // namespace zoo

ZOO_EXPORT const zoo::UpdateKernels* zoo_update_kernels();

// Scratch memory of the CPU kernels, uninitialised, from a multiple of 64 bytes on, so that no vector crosses a cache
// line.
//
// Not std::vector, nor anything else of the standard library that is a template: compiled with AVX-512 here, it would
// have the name that it has everywhere, and the linker could take it for the plain one.
#pragma once

#include <new>

#include "numbers.h"

namespace zoo {
inline namespace ZOO_ISA {

template <class T>
class Scratch {
 public:
  // Aligned by hand: the C library's own way takes several times as long for small sizes.
  explicit Scratch(int64_t count) : memory_(::operator new(size_t(count) * sizeof(T) + 64)) {}
  ~Scratch() { ::operator delete(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() const { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_) + 63) / 64 * 64); }

 private:
  void* memory_;
};

}  // namespace ZOO_ISA
}  // namespace zoo

// Scratch memory of the CPU kernels: floats from a multiple of 64 bytes on, so that no vector crosses a cache line.
// Not for files compiled for an instruction set: what they share with others is linked once, for one of them.
#pragma once

#include <cstdint>
#include <vector>

namespace zoo {

class Scratch {
 public:
  explicit Scratch(int64_t floats) : memory_(size_t(floats) + 16) {}

  float* data() {
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<float*>((at + 63) / 64 * 64);
  }

 private:
  std::vector<float> memory_;
};

}  // namespace zoo

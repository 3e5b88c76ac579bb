// Shared memory. For each block it begins as bytes of 0xFF: NaNs as numbers, -1 as an index, and no bool.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

namespace zoo_emulator {

constexpr int UNWRITTEN = 0xFF;

inline std::vector<void*> declared;  // the variables that the block has come to
inline char* dynamic_shared = nullptr;

inline void* shared_memory() { return dynamic_shared; }

// Follows the declaration of each variable in shared memory.
inline void declare(void* at, size_t size) {
  if (std::find(declared.begin(), declared.end(), at) != declared.end()) return;
  declared.push_back(at);
  memset(at, UNWRITTEN, size);
}

// What a launch asks for, of that very size, so that the address sanitizer knows where it ends.
class DynamicShared {
 public:
  explicit DynamicShared(size_t size) : size_(size), memory_(new char[size]) { dynamic_shared = memory_.get(); }
  void begin_block() const {
    declared.clear();
    memset(dynamic_shared, UNWRITTEN, size_);
  }

 private:
  size_t size_;
  std::unique_ptr<char[]> memory_;
};

static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16, "shared memory is read as float4");

}  // namespace zoo_emulator

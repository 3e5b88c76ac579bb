// Counts what torch's allocator of the CPU gives to a thread and takes back.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "../common/isa.h"

namespace {

namespace profiler = torch::profiler::impl;

struct Counts {
  int64_t now = 0, most = 0;
};

struct Block {
  std::weak_ptr<Counts> owner;
  int64_t size;
};

// Of all threads that count: a block may be freed by another one than it was given to.
std::mutex mutex;
std::unordered_map<void*, Block>& blocks() {
  static auto* all = new std::unordered_map<void*, Block>();  // blocks die after everything static
  return *all;
}

// The allocator tells what torch's profiler would be told, if this was one; it is switched off as a profiler.
struct Counter : profiler::ProfilerStateBase {
  Counter() : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled, false, true)) {}

  profiler::ActiveProfilerType profilerType() override { return profiler::ActiveProfilerType::NONE; }

  void reportMemoryUsage(void* address, int64_t size, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu() || address == nullptr) return;
    const std::lock_guard<std::mutex> held(mutex);
    if (size > 0) {
      blocks()[address] = Block{counts, size};
      counts->now += size;
      counts->most = std::max(counts->most, counts->now);
      return;
    }
    const auto found = blocks().find(address);
    if (found == blocks().end()) return;  // was there before anybody counted
    if (const auto owner = found->second.owner.lock()) owner->now -= found->second.size;
    blocks().erase(found);
  }

  void reportOutOfMemory(int64_t, size_t, size_t, c10::Device) override {}

  std::shared_ptr<Counts> counts = std::make_shared<Counts>();
};

Counter* counting() {
  return dynamic_cast<Counter*>(
      static_cast<c10::MemoryReportingInfoBase*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE)));
}

}  // namespace

// From now on what this thread allocates counts. 0, and nothing changes, where something counts or profiles already.
ZOO_EXPORT int32_t zoo_count_allocated(void) {
  if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) return 0;
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, std::make_shared<Counter>());
  return 1;
}

// Bytes that are allocated, and the most since the last `again`. 0 where nothing counts in this thread.
ZOO_EXPORT int32_t zoo_allocated(int64_t* now, int64_t* most, int32_t again) {
  auto* counter = counting();
  if (counter == nullptr) return 0;
  const std::lock_guard<std::mutex> held(mutex);
  *now = counter->counts->now;
  *most = counter->counts->most;
  if (again != 0) counter->counts->most = counter->counts->now;
  return 1;
}

// The count of this thread is over. 0 where there is none.
ZOO_EXPORT int32_t zoo_stop_counting_allocated(void) {
  if (counting() == nullptr) return 0;
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
  return 1;
}

// A storage that lives in the memory of another one, and memory in huge pages.
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "../common/isa.h"

namespace {

using Kept = c10::intrusive_ptr<c10::StorageImpl>;

void let_go(void* context) { delete static_cast<Kept*>(context); }

}  // namespace

// `holder` and `memory` are addresses of StorageImpls. What holder had is freed; memory lives until holder's storage is
// resized or dies, and keeps its own size from now on: resized, or given other memory, it would leave holder in memory
// that is freed. Returns 0, and changes nothing, unless both are plain memory of a CPU and holder may be resized.
ZOO_EXPORT int32_t zoo_lend_storage(void* holder, void* memory) {
  auto* to = static_cast<c10::StorageImpl*>(holder);
  auto* from = static_cast<c10::StorageImpl*>(memory);
  if (to == from || !to->resizable() || !to->device().is_cpu() || !from->device().is_cpu()) return 0;
  auto* kept = new Kept(Kept::reclaim_copy(from));
  from->set_resizable(false);
  // Whatever was in `to` is freed at the end of this statement.
  to->set_data_ptr(c10::DataPtr(from->mutable_data(), kept, &let_go, from->device()));
  to->set_nbytes(from->nbytes());
  return 1;
}

// Asks for huge pages in [address, address + size), whole pages of it alone. A hint: 0 where the system takes none.
ZOO_EXPORT int32_t zoo_huge_pages(void* address, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t begin = (at + page - 1) / page * page, end = (at + uintptr_t(size)) / page * page;
  return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  return 0;
#endif
}

// A storage that lives in the memory of another one.
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

#include "../common/isa.h"

namespace {

using Kept = c10::intrusive_ptr<c10::StorageImpl>;

void let_go(void* context) { delete static_cast<Kept*>(context); }

}  // namespace

// `holder` and `memory` are addresses of StorageImpls. What holder had is freed; memory lives until holder's storage is
// resized or dies. Returns 0, and changes nothing, unless both are plain memory of a CPU and holder may be resized.
ZOO_EXPORT int32_t zoo_lend_storage(void* holder, void* memory) {
  auto* to = static_cast<c10::StorageImpl*>(holder);
  auto* from = static_cast<c10::StorageImpl*>(memory);
  if (to == from || !to->resizable() || !to->device().is_cpu() || !from->device().is_cpu()) return 0;
  auto* kept = new Kept(Kept::reclaim_copy(from));
  // Whatever was in `to` is freed at the end of this statement.
  to->set_data_ptr(c10::DataPtr(from->mutable_data(), kept, &let_go, from->device()));
  to->set_nbytes(from->nbytes());
  return 1;
}

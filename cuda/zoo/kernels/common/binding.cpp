// What the kernels, which include nothing of torch, ask of it.
#include <ATen/Parallel.h>

#include "parallel.h"

namespace zoo {

int num_threads_of_torch() { return at::get_num_threads(); }

}  // namespace zoo

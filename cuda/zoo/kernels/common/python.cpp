// The module of the classes that kernels offer to Python (pybind11): a library of its own, since it is of one version
// of Python, while the kernels are of none.
#include "python.h"

PYBIND11_MODULE(zoo_kernels_python, m) {
  zoo::define_update_plan(m);
  zoo::define_token_layer(m);
}

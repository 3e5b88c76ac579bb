// The plan of an update as a class of Python. It calls kernels through a table of addresses.
#include "../common/python.h"
#include "plan.h"

namespace py = pybind11;

namespace zoo {
namespace {

std::unique_ptr<UpdatePlan> plan_of(uintptr_t kernels, const py::sequence& params, const py::sequence& states,
                                    const py::sequence& masters, const py::object& steps) {
  std::vector<Tensors> lists;
  for (const py::handle& list : states)
    lists.push_back(tensors_of(py::reinterpret_borrow<py::sequence>(list), "states"));
  TORCH_CHECK_VALUE(THPVariable_Check(steps.ptr()), "steps must be a tensor.");
  return std::make_unique<UpdatePlan>(reinterpret_cast<const UpdateKernels*>(kernels), tensors_of(params, "params"),
                                      std::move(lists), tensors_of(masters, "masters"),
                                      THPVariable_Unpack(steps.ptr()));
}

// Numbers as Settings.values() of algebra.py has them.
bool step_of(UpdatePlan& plan, int rule, int flags, const py::sequence& settings, int64_t step) {
  TORCH_CHECK_VALUE(settings.size() == NUM_SETTINGS, "settings has ", settings.size(), " numbers; it takes ",
                    NUM_SETTINGS, ".");
  double s[NUM_SETTINGS];
  for (size_t i = 0; i < NUM_SETTINGS; ++i) s[i] = settings[i].cast<double>();
  const py::gil_scoped_release free;
  return plan.update(rule, flags, {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9]}, step);
}

// Whether two lists have the very same objects at the same places. None of them is touched.
bool same_objects(const py::list& a, const py::list& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (PyList_GET_ITEM(a.ptr(), Py_ssize_t(i)) != PyList_GET_ITEM(b.ptr(), Py_ssize_t(i))) return false;
  return true;
}

}  // namespace

void define_update_plan(py::module_& m) {
  py::class_<UpdatePlan>(m, "UpdatePlan")
      .def(py::init(torch::wrap_pybind_function(&plan_of)))
      .def("update", torch::wrap_pybind_function(&step_of))
      .def("count", torch::wrap_pybind_function(&UpdatePlan::count));
  m.def("same_objects", &same_objects);
}

}  // namespace zoo

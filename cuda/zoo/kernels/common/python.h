// What the classes for Python of several folders have in common: one module has all of them.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

namespace zoo {

// Each of a folder's python.cpp.
void define_update_plan(pybind11::module_& m);
void define_token_layer(pybind11::module_& m);

// `what` names it in messages.
inline at::Tensor tensor_of(const pybind11::handle& item, const std::string& what) {
  TORCH_CHECK_VALUE(THPVariable_Check(item.ptr()), what, " is of type ",
                    std::string(pybind11::str(pybind11::type::of(item))), "; it must be a tensor.");
  return THPVariable_Unpack(item.ptr());
}

// The tensors of a list or tuple.
inline std::vector<at::Tensor> tensors_of(const pybind11::sequence& list, const char* what) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(list.size());
  for (const pybind11::handle& item : list)
    tensors.push_back(tensor_of(item, std::string(what) + "[" + std::to_string(tensors.size()) + "]"));
  return tensors;
}

}  // namespace zoo

// A decoder layer of few tokens as an object of Python that keeps its weights: a call takes what changes from token to
// token alone. It calls the two operators of binding.cpp, so it has their bits.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "../common/python.h"

namespace py = pybind11;

namespace zoo {
namespace {

typedef std::optional<at::Tensor> Optional;
typedef std::vector<at::Tensor> Tensors;

struct Product {
  Tensors weights, biases;
  std::vector<int64_t> codes;
};

struct Norm {
  at::Tensor weight;
  double eps;
  bool plus_one;
};

// As ops.py has them.
Product product_of(const py::sequence& product, const char* what) {
  TORCH_CHECK_VALUE(product.size() == 3, what, " has ", product.size(), " parts; a product has 3.");
  return {tensors_of(product[0], what), tensors_of(product[1], what), product[2].cast<std::vector<int64_t>>()};
}

Norm norm_of(const py::sequence& norm, const char* what) {
  TORCH_CHECK_VALUE(norm.size() == 3, what, " has ", norm.size(), " parts; a norm has 3.");
  return {tensor_of(norm[0], what), norm[1].cast<double>(), norm[2].cast<bool>()};
}

class TokenLayer {
 public:
  TokenLayer(const py::sequence& first, const py::sequence& qkv, const py::sequence& head_norms, int64_t heads,
             int64_t groups, double scale, const py::sequence& out, const py::sequence& second,
             const py::sequence& gate_up, std::string activation, const py::sequence& down)
      : first_(norm_of(first, "norm")),
        second_(norm_of(second, "second norm")),
        qkv_(product_of(qkv, "qkv")),
        out_(product_of(out, "out")),
        gate_up_(product_of(gate_up, "gate_up")),
        down_(product_of(down, "down")),
        heads_(heads),
        groups_(groups),
        scale_(scale),
        activation_(std::move(activation)) {
    for (const py::handle& norm : head_norms) {
      const Norm one = norm_of(py::reinterpret_borrow<py::sequence>(norm), "head norm");
      head_weights_.push_back(one.weight);
      head_eps_.push_back(one.eps);
      if (head_eps_.size() == 1) heads_plus_one_ = one.plus_one;
    }
  }

  // The layer of tokens x whose keys and values go to `places`; they see the first `length` of each row, where the mask
  // (batch, 1, tokens, length) says so.
  at::Tensor call(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& keys,
                  const at::Tensor& values, const at::Tensor& places, int64_t length, const Optional& mask) const {
    const py::gil_scoped_release free;
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto before =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("zoo::decoder_before_cache", "")
            .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double, bool, at::TensorList, at::TensorList,
                              at::IntArrayRef, at::TensorList, at::ArrayRef<double>, bool, const at::Tensor&,
                              const at::Tensor&, const Optional&, const Optional&, const Optional&, int64_t,
                              int64_t)>();
    static const auto after =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("zoo::decoder_after_cache", "")
            .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const Optional&, double, at::TensorList, at::TensorList, at::IntArrayRef,
                              const at::Tensor&, double, bool, at::TensorList, at::TensorList, at::IntArrayRef,
                              c10::string_view, at::TensorList, at::TensorList, at::IntArrayRef)>();
    TORCH_CHECK_VALUE(x.dim() == 3 && keys.dim() == 4 && length >= 0 && length <= keys.size(2), "x has ", x.dim(),
                      " dims and keys have shape ", keys.sizes(), "; they must have 3 and 4, with room for ", length,
                      " tokens.");
    if (mask)  // before anything is written
      TORCH_CHECK_VALUE(
          mask->sizes() == at::IntArrayRef({x.size(0), 1, x.size(1), length}) && mask->scalar_type() == at::kBool,
          "mask is ", mask->scalar_type(), " of shape ", mask->sizes(), "; it must be bool of [", x.size(0), ", 1, ",
          x.size(1), ", ", length, "].");
    for (const at::Tensor& t : {x, cos, sin, keys, values, places})
      TORCH_CHECK_VALUE(t.device() == first_.weight.device() && t.layout() == at::kStrided, "a tensor is ", t.layout(),
                        " on ", t.device(), "; the layer is on ", first_.weight.device(), ", strided.");
    const at::Tensor qkv =
        before.call(x, first_.weight, first_.eps, first_.plus_one, qkv_.weights, qkv_.biases, qkv_.codes, head_weights_,
                    head_eps_, heads_plus_one_, cos, sin, keys, values, places, heads_, groups_);
    const int64_t dim = keys.size(3);
    const at::Tensor q = qkv.narrow(2, 0, heads_ * dim).view({x.size(0), x.size(1), heads_, dim}).transpose(1, 2);
    Optional shown;
    if (mask) shown = mask->select(1, 0);
    return after.call(x, q, keys.narrow(2, 0, length), values.narrow(2, 0, length), shown, scale_, out_.weights,
                      out_.biases, out_.codes, second_.weight, second_.eps, second_.plus_one, gate_up_.weights,
                      gate_up_.biases, gate_up_.codes, activation_, down_.weights, down_.biases, down_.codes);
  }

 private:
  Norm first_, second_;
  Product qkv_, out_, gate_up_, down_;
  Tensors head_weights_;
  std::vector<double> head_eps_;
  bool heads_plus_one_ = false;
  int64_t heads_, groups_;
  double scale_;
  std::string activation_;
};

std::unique_ptr<TokenLayer> layer_of(const py::sequence& first, const py::sequence& qkv, const py::sequence& head_norms,
                                     int64_t heads, int64_t groups, double scale, const py::sequence& out,
                                     const py::sequence& second, const py::sequence& gate_up,
                                     const std::string& activation, const py::sequence& down) {
  return std::make_unique<TokenLayer>(first, qkv, head_norms, heads, groups, scale, out, second, gate_up, activation,
                                      down);
}

}  // namespace

void define_token_layer(py::module_& m) {
  py::class_<TokenLayer>(m, "TokenLayer")
      .def(py::init(torch::wrap_pybind_function(&layer_of)))
      .def("__call__", torch::wrap_pybind_function(&TokenLayer::call));
}

}  // namespace zoo

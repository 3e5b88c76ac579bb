"""What torch's other operators compute: elementwise operations, reductions and norms; and those that move bytes only.

Most are known by what torch says of them: an operator that is a view moves nothing, one with the tag "pointwise" is one
operation for each element of its result, one with the tag "reduction" one for each element that it reads. Here are the
others by name. Integers and booleans are no floating-point operations, and count as nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from zoo.cost.operators import Work, fft
from zoo.profiling.formulas.call import Call, Counted, Formula, elements, tensors

__all__ = ["MOVES", "OTHERS", "pointwise", "reduction"]


def pointwise(call: Call) -> Counted:
    """1 for each element of the results; of lists ("_foreach_add_"), of the first one that is given."""
    if not any(_computes(t) for t in call.inputs):
        return Work()
    made = sum(elements(t) for t in call.outputs)
    if not made:  # in place, on lists
        made = sum(elements(t) for t in tensors((_first(call),)))
    return Work(elementwise=made)


def reduction(call: Call) -> Counted:
    """1 for each element of the first tensor or list that is given."""
    given = list(tensors((_first(call),)))
    return Work(elementwise=sum(elements(t) for t in given if _computes(t)))


def _first(call: Call) -> object:
    return next(iter(call.given), None)


def _computes(tensor: object) -> bool:
    return bool(getattr(tensor, "is_floating_point", bool)() or getattr(tensor, "is_complex", bool)())


def _times(operations: int, of: Callable[[Call], object]) -> Formula:
    def formula(call: Call) -> Counted:
        return Work(elementwise=operations * sum(elements(t) for t in tensors((of(call),)) if _computes(t)))

    return formula


def _reads(operations: int) -> Formula:
    """``operations`` for each element of the first argument."""
    return _times(operations, _first)


def _makes(operations: int) -> Formula:
    """``operations`` for each element of the first result."""
    return _times(operations, lambda call: next(call.outputs, None))


def _norm(operations: int, weight: str = "weight") -> Formula:
    def formula(call: Call) -> Counted:
        affine = call[weight] is not None
        found = sum(t.numel() for t in tensors((_first(call),)))
        return Work(elementwise=(operations + (2 if affine else 0)) * found)

    return formula


def _batch_norm(call: Call) -> Counted:
    operations = (5 if call["training"] else 2) + (2 if call["weight"] is not None else 0)
    return Work(elementwise=operations * call["input"].numel())


def _rms_norm(call: Call) -> Counted:
    return Work(elementwise=(4 if call["weight"] is not None else 3) * call["input"].numel())


def _pool(call: Call) -> Counted:
    """Every position of a window is one comparison or addition."""
    kernel = call["kernel_size"]
    spatial = {"avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3, "max_pool2d_with_indices": 2,
               "max_pool3d_with_indices": 3}.get(call.name.split("::")[1], len(kernel))  # fmt: skip
    window = 1
    for size in list(kernel) * (spatial if len(kernel) == 1 else 1):
        window *= int(size)
    return Work(elementwise=window * next(call.outputs).numel())


def _fft(call: Call) -> Counted:
    x, found = call["self"], Work()
    for dim in call["dim"]:
        found += fft(x.numel(), int(x.shape[dim]), real=not x.is_complex())
    return Work(elementwise=found.elementwise)


def _cdist(call: Call) -> Counted:
    *_, size = call.shape("x1")
    return Work(elementwise=3 * size * next(call.outputs).numel())


def _euclidean_dist(call: Call) -> Counted:
    """|x - y|² = |x|² - 2 x·y + |y|² of P rows by R rows of D: a product of (P, D + 2) and (D + 2, R), the norms in
    its last two places. 3 operations an element of x, 2 of y, and a clamp and a root a result."""
    x, y, out = call["x1"], call["x2"], next(call.outputs)
    size = int(x.shape[-1])
    return Work(macs=out.numel() * (size + 2), elementwise=3 * x.numel() + 2 * y.numel() + 2 * out.numel())


def _optimizer(operations: int) -> Formula:
    """For each element of the parameters, which are the first list."""
    return _reads(operations)


_FEW = {
    "_softmax": 5, "_log_softmax": 5, "_safe_softmax": 5, "_masked_softmax": 6, "softmax": 5, "log_softmax": 5,
    "_softmax_backward_data": 4, "_log_softmax_backward_data": 4, "_masked_softmax_backward": 5, "logsumexp": 4,
    "native_layer_norm_backward": 14, "native_batch_norm_backward": 14, "native_group_norm_backward": 14,
    "batch_norm_backward": 14, "cudnn_batch_norm_backward": 14, "_fused_rms_norm_backward": 10,
    "var": 4, "var_mean": 4, "std": 4, "std_mean": 4, "nll_loss_forward": 1, "nll_loss2d_forward": 1, "cumsum": 1,
    "cumprod": 1, "logcumsumexp": 3, "cummax": 1, "cummin": 1, "norm": 2, "linalg_vector_norm": 2, "dist": 3,
    "linalg__powsum": 2, "_foreach_norm": 2, "renorm": 3, "prod": 1, "trace": 1, "_aminmax": 2, "aminmax": 2,
    "binary_cross_entropy": 5, "binary_cross_entropy_backward": 4, "mse_loss": 3, "mse_loss_backward": 2,
    "smooth_l1_loss": 4, "smooth_l1_loss_backward": 3, "huber_loss": 4, "huber_loss_backward": 3,
    "soft_margin_loss": 4, "soft_margin_loss_backward": 4, "multi_margin_loss": 3, "multi_margin_loss_backward": 3,
    "multilabel_margin_loss_forward": 3, "multilabel_margin_loss_backward": 3, "kthvalue": 1, "median": 1,
    "nanmedian": 1, "mode": 1, "topk": 1, "sort": 1, "_adaptive_avg_pool2d": 1, "_adaptive_avg_pool3d": 1,
    "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 1, "adaptive_max_pool2d": 1, "adaptive_max_pool3d": 1,
    "mkldnn_adaptive_avg_pool2d": 1, "_adaptive_avg_pool2d_backward": 1, "_adaptive_avg_pool3d_backward": 1,
    "adaptive_avg_pool3d_backward": 1, "adaptive_max_pool2d_backward": 1, "adaptive_max_pool3d_backward": 1,
    "avg_pool2d_backward": 1, "avg_pool3d_backward": 1, "max_pool2d_with_indices_backward": 1,
    "max_pool3d_with_indices_backward": 1, "histc": 1, "linalg_cross": 5, "glu": 2, "glu_backward": 5,
    "native_dropout": 2, "native_dropout_backward": 2, "_fused_dropout": 2, "_weight_norm_interface": 4,
    "_weight_norm_interface_backward": 6, "_masked_scale": 2,
    "_amp_foreach_non_finite_check_and_unscale_": 2, "_prelu_kernel": 2, "_prelu_kernel_backward": 3, "elu": 3,
    "cross": 5, "_transform_bias_rescale_qkv": 2, "fake_quantize_per_tensor_affine_cachemask": 4,
    "fake_quantize_per_channel_affine_cachemask": 4, "rrelu_with_noise": 2, "rrelu_with_noise_backward": 2,
    "rrelu_with_noise_": 2, "rrelu_with_noise_functional": 2, "log_sigmoid_forward": 4, "log_sigmoid_backward": 4,
    "allclose": 2, "count_nonzero": 1, "isin": 1, "_compute_linear_combination": 2, "floor_divide": 1,
    "_add_relu": 2, "hardswish": 4, "elu_backward": 3, "hardtanh_backward": 2, "leaky_relu_backward": 2,
    "softplus_backward": 4, "hardsigmoid_backward": 2, "hardswish_backward": 4, "hardshrink_backward": 1,
    "softshrink_backward": 1, "binary_cross_entropy_with_logits": 6, "batch_norm_stats": 4, "batch_norm_elemt": 4,
    "batch_norm_backward_reduce": 6, "batch_norm_backward_elemt": 6, "quantize_per_tensor": 2, "dequantize": 2,
    "quantize_per_channel": 2, "fractional_max_pool2d_backward": 1, "miopen_batch_norm_backward": 14,
    "_cdist_backward": 6, "_sparse_softmax": 5, "_sparse_log_softmax": 5, "_sparse_sum": 1, "_coalesce": 1,
    "_sparse_softmax_backward_data": 4, "_sparse_log_softmax_backward_data": 4,
    "segment_reduce": 1, "_upsample_nearest_exact2d_backward": 1,
}  # fmt: skip
_OF_RESULTS = {
    "_embedding_bag": 1, "_embedding_bag_forward_only": 1, "upsample_bilinear2d": 7, "upsample_linear1d": 3,
    "upsample_trilinear3d": 15, "upsample_bicubic2d": 31, "_upsample_bilinear2d_aa": 7, "_upsample_bicubic2d_aa": 31,
    "grid_sampler_2d": 7, "grid_sampler_3d": 15, "cudnn_grid_sampler": 7, "_grid_sampler_2d_cpu_fallback": 7,
    "affine_grid_generator": 6, "pow": 1, "celu": 3, "linspace": 2, "_foreach_pow": 1, "polar": 2,
}  # fmt: skip
_OF_GRADIENTS = {
    "embedding_dense_backward": 1, "_embedding_bag_dense_backward": 1, "nll_loss_backward": 1,
    "nll_loss2d_backward": 1, "upsample_bilinear2d_backward": 7, "upsample_linear1d_backward": 3,
    "upsample_trilinear3d_backward": 15, "upsample_bicubic2d_backward": 31, "upsample_nearest1d_backward": 1,
    "upsample_nearest2d_backward": 1, "upsample_nearest3d_backward": 1, "_upsample_bilinear2d_aa_backward": 7,
    "_upsample_bicubic2d_aa_backward": 31, "grid_sampler_2d_backward": 14, "grid_sampler_3d_backward": 30,
    "unfold_backward": 1,
}  # fmt: skip
_ADDS = {  # each element of what is scattered is added
    "index_add": "source", "index_add_": "source", "scatter_add": "src", "scatter_add_": "src",
    "scatter_reduce": "src", "scatter_reduce_": "src", "index_reduce": "source", "index_reduce_": "source",
}  # fmt: skip
_OPTIMIZERS = {"_fused_adam_": 13, "_fused_adamw_": 13, "_fused_sgd_": 4, "_fused_adagrad_": 6}


def _added(name: str) -> Formula:
    return _times(1, lambda call: call[name])


OTHERS: dict[str, Formula] = {
    **{name: _reads(times) for name, times in (_FEW | _OF_GRADIENTS | _OPTIMIZERS).items()},
    **{name: _makes(times) for name, times in _OF_RESULTS.items()},
    **{name: _added(argument) for name, argument in _ADDS.items()},
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), _batch_norm),
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit_no_training": _norm(2),
    "_batch_norm_with_update": _norm(5),
    "_batch_norm_no_update": _norm(2),
    "native_layer_norm": _norm(5),
    "native_group_norm": _norm(5),
    "_fused_rms_norm": _rms_norm,
    **dict.fromkeys(
        ("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"), _pool
    ),
    "mkldnn_max_pool2d": _pool,
    "mkldnn_max_pool3d": _pool,
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), _fft),
    "_cdist_forward": _cdist,
    "_euclidean_dist": _euclidean_dist,
}
"""Of operators of ``aten``."""

_MOVES = """
    _adaptive_avg_pool_sizes _amp_update_scale_ _assert_async _assert_scalar _assert_tensor_metadata _chunk_cat
    _coalesced_ _copy_from _copy_from_and_resize _cudnn_init_dropout_state _cudnn_rnn_flatten_weight
    _efficientzerotensor _fill_mem_eff_dropout_mask_ _foreach_clone _foreach_copy_ _foreach_zero_
    _functional_assert_async _functional_assert_scalar _functional_sym_constrain_range _fused_sdp_choice
    _has_same_storage_numel _index_put_impl_ _is_all_true _is_any_true _lazy_clone _local_scalar_dense
    _mkldnn_reshape _mkldnn_transpose _nested_from_padded _nested_tensor_from_mask _new_zeros_with_same_feature_meta
    _pack_padded_sequence _philox_normal _philox_uniform _pin_memory _print _reshape_copy _resize_output_ _stack
    _coalesced _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo
    _linalg_check_errors _to_copy _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr
    is_coalesced lu_unpack sparse_mask _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _unsafe_view _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d all any arange argmax argmin as_strided_ as_strided_scatter bernoulli bernoulli_
    bincount block_diag bucketize cat cauchy_ channel_shuffle clone col2im complex constant_pad_nd copy copy_
    detach_ diag_embed diagonal_backward diagonal_scatter embedding embedding_renorm_ empty empty_like
    empty_permuted empty_strided equal exponential exponential_ eye fill fill_ flip full full_like gather geometric_
    hash_tensor im2col index index_copy index_copy_ index_fill index_fill_ index_put index_put_ index_select
    is_nonzero is_pinned is_same_size is_set_to isinf isnan lift lift_fresh log_normal_ logical_and logical_not
    logical_or logical_xor masked_fill masked_fill_ masked_scatter masked_scatter_ masked_scatter_backward
    masked_select max_unpool2d max_unpool3d mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight multinomial
    narrow_copy new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_static normal normal_
    normal_functional ones ones_like pixel_shuffle pixel_unshuffle poisson put put_ rand rand_like randint
    randint_like randn randn_like random random_ randperm range record_stream reflection_pad1d
    reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward
    repeat repeat_interleave replication_pad1d replication_pad1d_backward replication_pad2d
    replication_pad2d_backward replication_pad3d replication_pad3d_backward resize_ resize_as_ roll rot90
    scalar_tensor scatter scatter_ searchsorted select_backward select_scatter set_ slice_backward slice_scatter
    split_copy split_with_sizes_copy squeeze_ stack sym_constrain_range sym_constrain_range_for_size sym_numel
    sym_size sym_storage_offset sym_stride t_ take to_mkldnn to_padded_tensor transpose_ tril tril_ tril_indices
    triu triu_ triu_indices unbind_copy uniform uniform_ unique_consecutive unique_dim unsafe_split
    unsafe_split_with_sizes unsqueeze_ upsample_nearest1d upsample_nearest2d upsample_nearest3d view_as_complex
    view_as_real where zero zero_ zeros zeros_like
"""
MOVES = frozenset(_MOVES.split())
"""Operators of ``aten`` that copy, gather, make, draw or compare, and compute with no floating-point number."""

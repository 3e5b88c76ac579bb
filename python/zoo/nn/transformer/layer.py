"""A transformer layer as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zoo.nn.transformer.config import COMPUTE_DTYPES, TransformerLayerConfig
from zoo.nn.transformer.saved import Kept

Tensor = torch.Tensor
_INITIAL = (
    "query",
    "key",
    "value",
    "attention's output",
    "its normalisation",
    "intermediate",
    "output",
    "normalisation",
)
"""What the initial weights and biases are of, in their order."""


class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward part, each with dropout, residual and normalisation: the encoder layer of BERT
    (Devlin et al. 2019; Vaswani et al. 2017, section 3.1), or its pre-norm form.

    One autograd function: what it keeps for backward is the table of :mod:`zoo.nn.transformer.saved`. Masks of dropout
    are functions of place, Philox of (seed, a number that torch's CPU generator gives each call), and never kept. So
    ``torch.manual_seed`` repeats a run, and recomputation under activation checkpointing drops the same.

    Parameters (C hidden, I inner size): ``attn_qkvw`` (3·C, C), ``attn_qkvb``, ``attn_ow`` (C, C), ``attn_ob``,
    ``attn_nw``, ``attn_nb`` (normalisation after attention's residual), ``inter_w`` (I, C), ``inter_b``, ``output_w``
    (C, I), ``output_b``, ``norm_w``, ``norm_b`` (normalisation of the input with pre-norm, else of the output).

    Args:
        config: sizes and options.
        initial_weights: of queries, keys, values, attention's output, the normalisation after it, intermediate, output,
            the other normalisation; copied. None: normal, with the standard deviations of ``config``; ones.
        initial_biases: of the same; None: zeros.
        device, dtype: of the parameters.

    Raises:
        ValueError: another config; initial values of another number or shape; with the shapes.
    """

    def __init__(
        self, config: TransformerLayerConfig, initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(config, TransformerLayerConfig):
            raise ValueError(f"config is a {type(config).__name__}; it must be a zoo.nn.TransformerLayerConfig.")
        self.layer_config = config
        for name, shape in _shapes(config).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()
        with torch.no_grad():
            if initial_weights is not None:
                self._take("initial_weights", initial_weights, "w")
            if initial_biases is not None:
                self._take("initial_biases", initial_biases, "b")

    def reset_parameters(self) -> None:
        """Give the parameters initial values: matrices normal, biases zero, weights of normalisations one."""
        config = self.layer_config
        with torch.no_grad():
            for name in ("attn_qkvw", "inter_w"):
                getattr(self, name).normal_(0.0, config.initializer_range)
            for name in ("attn_ow", "output_w"):
                getattr(self, name).normal_(0.0, config.output_std)
            for name, _ in self.named_parameters(recurse=False):
                if name.endswith(("nw", "norm_w")):
                    getattr(self, name).fill_(1.0)
                elif name.endswith("b"):
                    getattr(self, name).zero_()

    def _take(self, what: str, given: Sequence[Tensor], end: str) -> None:
        tensors = hasattr(given, "__len__") and all(isinstance(value, Tensor) for value in given)
        if not tensors or len(given) != len(_INITIAL):
            said = f"has {len(given)} tensors" if tensors else f"is {given!r}, and no tensors"
            raise ValueError(f"{what} {said}; it must have {len(_INITIAL)}: {', '.join(_INITIAL)}.")
        own = [getattr(self, name + end) for name in ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")]
        targets = [*own[0].chunk(3), *own[1:]]
        for k, (target, value, name) in enumerate(zip(targets, given, _INITIAL, strict=True)):
            if value.shape != target.shape:
                raise ValueError(
                    f"{what}[{k}], of the {name}, has shape {tuple(value.shape)}; it must be {tuple(target.shape)}."
                )
            target.copy_(value)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """y (B, T, C) of x (B, T, C).

        Args:
            hidden_states: x, of the dtype of the parameters, unless autocast or ``compute_dtype`` says which it is.
            attention_mask: added to the scores, 0 for keys that are seen and a large negative number for others;
                broadcasts to (B, H, T, T), as (B, 1, 1, T) does. It gets no gradient.

        Raises:
            ValueError: a shape or dtype that cannot be; a zero in the weight of a normalisation that is inverted.
            NotImplementedError: the mask wants a gradient; a transform of torch.func.
        """
        # zoo-kernels may be missing where nobody runs a layer.
        from zoo.nn.transformer.function import Call, LayerFunction, Weights, forward_of, without_autocast

        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError(
                f"a transform of torch.func (vmap, grad, jacrev, jvp, ...) over a {type(self).__name__}, whose "
                "backward is written by hand: use torch.autograd, or a layer of torch's."
            )
        dtype = self._compute_dtype(hidden_states)
        self._check(hidden_states, attention_mask)
        config = self.layer_config
        dropping = self.training and max(config.attn_dropout_ratio, config.hidden_dropout_ratio) > 0
        offset = int(torch.randint(2**62, (), device="cpu")) if dropping else 0
        call = Call(config, dtype, dropping, offset)
        weights = Weights(*(getattr(self, name) for name in Weights._fields))
        if torch.is_grad_enabled() and any(t.requires_grad for t in (hidden_states, *weights)):
            if config.normalize_invertible:
                self._check_invertible()
            out: Tensor = LayerFunction.apply(hidden_states, attention_mask, call, *weights)
            return out
        with torch.no_grad(), without_autocast(hidden_states):
            return forward_of(hidden_states, attention_mask, weights, call, Kept())

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        device, own = x.device.type, self.attn_qkvw.dtype
        if self.layer_config.compute_dtype is not None:
            return self.layer_config.compute_dtype
        if not x.is_meta and torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
            return torch.get_autocast_dtype(device)
        if x.dtype is not own:
            raise ValueError(
                f"hidden_states are {x.dtype} and the parameters {own}; cast one of them, run under torch.autocast, or "
                "set compute_dtype."
            )
        return own

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        config = self.layer_config
        if x.dim() != 3 or x.shape[-1] != config.hidden_size:
            raise ValueError(
                f"hidden_states have shape {tuple(x.shape)}; it must be (sequences, tokens, {config.hidden_size})."
            )
        if x.dtype not in (*COMPUTE_DTYPES, torch.float64):
            raise ValueError(f"hidden_states are {x.dtype}; allowed are {', '.join(map(str, COMPUTE_DTYPES))}.")
        if mask is None:
            return
        wanted = (x.shape[0], config.heads, x.shape[1], x.shape[1])
        fits = mask.dim() == 4 and all(have in (1, want) for have, want in zip(mask.shape, wanted, strict=True))
        if not fits or not mask.is_floating_point():
            raise ValueError(
                f"attention_mask is {mask.dtype} of shape {tuple(mask.shape)}; it is added to the scores, so it must "
                f"be floating and broadcast to {wanted}: ({wanted[0]}, 1, 1, {wanted[3]}) with 0 for tokens that are "
                "seen and a large negative number for others."
            )
        if mask.requires_grad:
            raise NotImplementedError(
                "attention_mask requires a gradient, which this layer does not compute; detach it."
            )

    def _check_invertible(self) -> None:
        for name in ("attn_nw", "norm_w"):
            zeros = int((getattr(self, name) == 0).sum())
            if zeros:
                raise ValueError(
                    f"normalize_invertible divides by {name}, which has {zeros} zeros; set it to False, or the weights "
                    "to other numbers."
                )

    def extra_repr(self) -> str:
        """The sizes."""
        c = self.layer_config
        return f"hidden_size={c.hidden_size}, heads={c.heads}, intermediate_size={c.inner_size}"


def _shapes(config: TransformerLayerConfig) -> dict[str, tuple[int, ...]]:
    c, inner = config.hidden_size, config.inner_size
    return {
        "attn_qkvw": (3 * c, c), "attn_qkvb": (3 * c,), "attn_ow": (c, c), "attn_ob": (c,), "attn_nw": (c,),
        "attn_nb": (c,), "inter_w": (inner, c), "inter_b": (inner,), "output_w": (c, inner), "output_b": (c,),
        "norm_w": (c,), "norm_b": (c,),
    }  # fmt: skip

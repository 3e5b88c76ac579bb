"""What a transformer layer is told."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

_POSITIVE = ("hidden_size", "heads", "intermediate_size", "num_hidden_layers")
_RATIOS = ("attn_dropout_ratio", "hidden_dropout_ratio")
_NOT_NEGATIVE = ("layer_norm_eps", "initializer_range")
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class TransformerLayerConfig:
    """Sizes, dropout, initial values and what is not kept for backward, of a :class:`~.layer.TransformerLayer`.

    Args:
        hidden_size: C, numbers a token; a multiple of ``heads``.
        heads: H.
        intermediate_size: I, of the feed-forward part; None: 4·C.
        attn_dropout_ratio: the probability to drop a probability of attention, 0 to 1.
        hidden_dropout_ratio: the probability to drop an output of attention and of the feed-forward part.
        layer_norm_eps: ε, added to variances.
        pre_layer_norm: normalise the input of each part (Xiong et al. 2020), else its sum with the residual, as BERT.
        gelu: ``"none"``, z·Φ(z) itself, as BERT, or ``"tanh"``, its approximation.
        initializer_range: standard deviation of the initial weights.
        adjust_init_range: that of the two matrices before a residual is divided by √(2·num_hidden_layers).
        num_hidden_layers: of the model.
        seed: key of the random words of dropout; None: 0.
        compute_dtype: fp32, bf16 or fp16, of the products and of the result; parameters and inputs of another dtype
            are cast, with no copy kept. None: that of autocast where it is on, else that of the parameters.
        normalize_invertible: keep what a normalisation gives instead of what it is given, which is computed back.
            Weights of normalisations that are zero are refused then.
        gelu_checkpoint: compute GELU again in the backward.
        attn_dropout_checkpoint: compute the probabilities of attention again in the backward.

    Raises:
        ValueError: a value that cannot be; with the numbers.
    """

    hidden_size: int
    heads: int
    intermediate_size: int | None = None
    attn_dropout_ratio: float = 0.1
    hidden_dropout_ratio: float = 0.1
    layer_norm_eps: float = 1e-12
    pre_layer_norm: bool = True
    gelu: str = "none"
    initializer_range: float = 0.02
    adjust_init_range: bool = True
    num_hidden_layers: int = 1
    seed: int | None = None
    compute_dtype: torch.dtype | None = None
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    attn_dropout_checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is None and name == "intermediate_size":
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and heads {self.heads}; hidden_size must be a multiple of heads."
            )
        for name in (*_RATIOS, *_NOT_NEGATIVE):
            self._check_number(name, 1.0 if name in _RATIOS else math.inf)
        for field in fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise ValueError(f"{field.name} is {getattr(self, field.name)!r}; it must be True or False.")
        if self.gelu not in ("none", "tanh"):
            raise ValueError(f"gelu is {self.gelu!r}; it must be 'none' or 'tanh'.")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**64):
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number of 64 bits, not negative, or None.")
        if self.compute_dtype not in (None, *COMPUTE_DTYPES):
            raise ValueError(
                f"compute_dtype is {self.compute_dtype}; it must be one of {', '.join(map(str, COMPUTE_DTYPES))}, "
                "or None."
            )

    def _check_number(self, name: str, most: float) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value <= most or math.isinf(value):
            allowed = "between 0 and 1" if most == 1.0 else "a number, not negative"
            raise ValueError(f"{name} is {value!r}; it must be {allowed}.")

    @property
    def inner_size(self) -> int:
        """I."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def head_size(self) -> int:
        """D = C/H."""
        return self.hidden_size // self.heads

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial weights before a residual."""
        return self.initializer_range / math.sqrt(2.0 * self.num_hidden_layers if self.adjust_init_range else 1.0)

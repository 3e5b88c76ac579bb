"""``DeepSpeedTransformerConfig``: what a transformer layer is told, under DeepSpeed's names."""

from __future__ import annotations

import codecs
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.nn import TransformerLayerConfig
from zoo.registry.errors import near

_BOOKS = ("layer_id", "test_gemm", "is_grad_enabled")
"""What DeepSpeed keeps in the object besides: documents may have it, and it does nothing."""


class DeepSpeedTransformerConfig:
    """Sizes, dropout, initial values and what is not kept for backward.

    Args:
        batch_size: makes no difference: nothing is set aside.
        hidden_size, heads: of the layer; hidden_size is a multiple of heads.
        intermediate_size: of the feed-forward part; None or not above 0: 4·hidden_size.
        attn_dropout_ratio, hidden_dropout_ratio: probabilities to drop.
        num_hidden_layers, initializer_range, adjust_init_range: of initial weights (:class:`TransformerLayerConfig`).
        layer_norm_eps: added to variances.
        local_rank: the device to make the current one, if not None or negative, and there are several.
        seed: key of dropout's random words; None or negative: 0.
        fp16: compute in fp16, whatever the dtype of parameters and input.
        pre_layer_norm: normalise the input of each part, else its sum with the residual.
        normalize_invertible, gelu_checkpoint, attn_dropout_checkpoint: what is not kept for backward.
        stochastic_mode: allows results to differ from run to run; zoo's do not.
        return_tuple: the layer returns a tuple of one.
        training: False: the layer begins in ``eval()``. Later it says what the layer last was.
    """

    def __init__(
        self, batch_size: int = -1, hidden_size: int = -1, intermediate_size: int | None = -1, heads: int = -1,
        attn_dropout_ratio: float = -1, hidden_dropout_ratio: float = -1, num_hidden_layers: int = -1,
        initializer_range: float = -1, layer_norm_eps: float = 1e-12, local_rank: int | None = -1,
        seed: int | None = -1, fp16: bool = False, pre_layer_norm: bool = True, normalize_invertible: bool = False,
        gelu_checkpoint: bool = False, adjust_init_range: bool = True, attn_dropout_checkpoint: bool = False,
        stochastic_mode: bool = False, return_tuple: bool = False, training: bool = True,
    ) -> None:  # fmt: skip
        self.layer_id = -1
        self.batch_size = batch_size
        self.hidden_size = hidden_size
        inner: Any = intermediate_size
        self.intermediate_size = 4 * hidden_size if inner is None or (isinstance(inner, int) and inner <= 0) else inner
        self.heads = heads
        self.attn_dropout_ratio = attn_dropout_ratio
        self.hidden_dropout_ratio = hidden_dropout_ratio
        self.num_hidden_layers = num_hidden_layers
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        self.local_rank = -1 if local_rank is None else local_rank
        self.seed = -1 if seed is None else seed
        self.fp16 = fp16
        self.pre_layer_norm = pre_layer_norm
        self.normalize_invertible = normalize_invertible
        self.gelu_checkpoint = gelu_checkpoint
        self.adjust_init_range = adjust_init_range
        self.attn_dropout_checkpoint = attn_dropout_checkpoint
        self.stochastic_mode = stochastic_mode
        self.return_tuple = return_tuple
        self.training = training
        self.test_gemm = False
        self.is_grad_enabled = True

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        """That of a document whose keys are the arguments.

        Raises:
            ValueError: other keys; those like them are told.
        """
        if not isinstance(json_object, Mapping):
            raise ValueError(
                f"the document is a {type(json_object).__name__}; it must be a mapping of keys and values."
            )
        known = [*inspect.signature(cls).parameters]
        unknown = [key for key in json_object if key not in (*known, *_BOOKS)]
        if unknown:
            like = sorted({name for key in unknown for name in near(key, known)})
            raise ValueError(
                f"a transformer layer is not configured by {', '.join(map(repr, unknown))}"
                + (f"; like it: {', '.join(like)}" if like else "")
                + f". Its keys are {', '.join(known)}."
            )
        return cls(**{key: value for key, value in json_object.items() if key in known})

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> DeepSpeedTransformerConfig:
        """That of a file of JSON, in UTF-8, or UTF-16 with its mark.

        Raises:
            ValueError: it is not JSON, or not an object; or see :meth:`from_dict`.
        """
        data = Path(json_file).read_bytes()
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        try:
            document = json.loads(data.decode("utf-16" if wide else "utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{json_file} is not JSON in UTF-8 or UTF-16: {error}") from error
        if not isinstance(document, dict):
            raise ValueError(f"{json_file} has a {type(document).__name__}; it must be an object of keys and values.")
        return cls.from_dict(document)

    def layer_config(self, *, initialises: bool = True) -> TransformerLayerConfig:
        """What zoo's layer is told; ``initialises``: whether initial weights are drawn.

        Raises:
            ValueError: a value that cannot be, -1 for one that was not given.
        """
        drawn: dict[str, Any] = {}
        if initialises:
            drawn["initializer_range"] = self.initializer_range
            if self.adjust_init_range:
                drawn["num_hidden_layers"] = self.num_hidden_layers
        seed: Any = None if type(self.seed) is int and self.seed < 0 else self.seed
        return TransformerLayerConfig(
            hidden_size=self.hidden_size, heads=self.heads, intermediate_size=self.intermediate_size,
            attn_dropout_ratio=self.attn_dropout_ratio, hidden_dropout_ratio=self.hidden_dropout_ratio,
            layer_norm_eps=self.layer_norm_eps, pre_layer_norm=self.pre_layer_norm,
            adjust_init_range=self.adjust_init_range, seed=seed,
            compute_dtype=torch.float16 if self.fp16 else None, normalize_invertible=self.normalize_invertible,
            gelu_checkpoint=self.gelu_checkpoint, attn_dropout_checkpoint=self.attn_dropout_checkpoint, **drawn,
        )  # fmt: skip

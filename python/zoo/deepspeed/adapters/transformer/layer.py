"""``DeepSpeedTransformerLayer``: zoo's transformer layer under DeepSpeed's names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator
from zoo.deepspeed.adapters.transformer.config import DeepSpeedTransformerConfig
from zoo.nn import TransformerLayer

Tensor = torch.Tensor


class DeepSpeedTransformerLayer(TransformerLayer):
    """A :class:`~zoo.nn.TransformerLayer`, whose parameters have DeepSpeed's names.

    Args:
        config: gets ``layer_id``.
        initial_weights, initial_biases: of queries, keys, values, attention's output, the normalisation after it,
            intermediate, output and the other normalisation; copied.
    """

    layer_id = 0
    """How many layers have been made."""

    def __init__(
        self, config: DeepSpeedTransformerConfig, initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(config, DeepSpeedTransformerConfig):
            raise ValueError(f"config is a {type(config).__name__}; it must be a DeepSpeedTransformerConfig.")
        if type(config.local_rank) is not int:
            raise ValueError(f"local_rank is {config.local_rank!r}; it must be a whole number, as int() makes it.")
        if config.local_rank >= 0:
            get_accelerator().set_device(config.local_rank)
        super().__init__(config.layer_config(initialises=initial_weights is None), initial_weights, initial_biases)
        self.config = config
        config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        self.train(config.training)

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Draw initial weights again; see ``adjust_init_range`` of the configuration."""
        adjusted = copy.copy(self.config)
        adjusted.adjust_init_range = adjust_init_range
        before, self.layer_config = self.layer_config, adjusted.layer_config()
        self.reset_parameters()
        self.layer_config = before

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, head_mask: Any = None,
        layer_head_mask: Any = None, encoder_hidden_states: Any = None, encoder_attention_mask: Any = None,
        past_key_value: Any = None, output_attentions: bool = False, grads: Any = None,
    ) -> Tensor | tuple[Tensor]:  # fmt: skip
        """y (B, T, C) of x (B, T, C) with a mask that is added to the scores; or (y,) with ``return_tuple``.

        Raises:
            NotImplementedError: one of the other arguments is given.
        """
        given = {
            "head_mask": head_mask, "layer_head_mask": layer_head_mask, "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask, "past_key_value": past_key_value,
            "output_attentions": output_attentions or None, "grads": grads,
        }  # fmt: skip
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise NotImplementedError(
                f"{', '.join(refused)} of a transformer layer: it computes self-attention of whole sequences alone, "
                "and returns no probabilities. Leave them out; gradients are in .grad of the parameters."
            )
        self.config.training, self.config.is_grad_enabled = self.training, torch.is_grad_enabled()
        y = super().forward(hidden_states, attention_mask)
        return (y,) if self.config.return_tuple else y

"""A whole transformer layer as one autograd function, that keeps little for backward.

* :class:`TransformerLayer`, :class:`TransformerLayerConfig`: the layer of BERT and its pre-norm form.
* :mod:`.saved`: what it keeps for backward, a table.
"""

from zoo.nn.transformer.config import TransformerLayerConfig
from zoo.nn.transformer.layer import TransformerLayer
from zoo.nn.transformer.saved import kept_rows, saved_bytes

__all__ = ["TransformerLayer", "TransformerLayerConfig", "kept_rows", "saved_bytes"]

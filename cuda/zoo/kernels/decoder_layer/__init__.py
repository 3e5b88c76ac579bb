"""A decoder layer of few tokens in two calls."""

from zoo.kernels.decoder_layer.ops import Product, RmsNorm, after_cache, attention, before_cache, feed_forward

__all__ = ["Product", "RmsNorm", "after_cache", "attention", "before_cache", "feed_forward"]

"""A decoder layer of few tokens in two calls, or in one that keeps its weights."""

from zoo.kernels.decoder_layer.ops import Product, RmsNorm, after_cache, attention, before_cache, feed_forward, prepare

__all__ = ["Product", "RmsNorm", "after_cache", "attention", "before_cache", "feed_forward", "prepare"]

"""Quantisation after training: grids, GPTQ, low-rank compensation, layer-by-layer distillation."""

from zoo.compression.post_training.gptq import Inputs, Quantised, gptq, nearest
from zoo.compression.post_training.grids import Binary, Floating, Grid, Ternary, Uniform
from zoo.compression.post_training.lorc import low_rank
from zoo.compression.post_training.recipe import Layer, Recipe, quantise

__all__ = [
    "Binary",
    "Floating",
    "Grid",
    "Inputs",
    "Layer",
    "Quantised",
    "Recipe",
    "Ternary",
    "Uniform",
    "gptq",
    "low_rank",
    "nearest",
    "quantise",
]

"""Quantisation after training: grids, GPTQ, low-rank compensation, layer-by-layer distillation, ZeroQuant."""

from zoo.compression.post_training.gptq import Inputs, Quantised, gptq, nearest
from zoo.compression.post_training.grids import Binary, Floating, Grid, Ternary, Uniform
from zoo.compression.post_training.lorc import low_rank
from zoo.compression.post_training.recipe import Layer, Recipe, quantise
from zoo.compression.post_training.tokens import quantise_inputs
from zoo.compression.post_training.zeroquant import zeroquant

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
    "quantise_inputs",
    "zeroquant",
]

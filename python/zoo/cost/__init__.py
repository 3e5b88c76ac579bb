"""What a computation, a message and a step cost: bytes, floating-point operations and seconds, without torch."""

from zoo.cost.calibrate import Calibration, Run, calibrate
from zoo.cost.collectives import seconds, wire_bytes
from zoo.cost.goodput import Goodput, goodput
from zoo.cost.hardware import Channel, Device, Hardware, HardwareError, Link, Measured, Tile, hardware, hardware_names
from zoo.cost.layouts import Forecasted, forecast_layout, layouts, nearest
from zoo.cost.memory import Memory, memory_of
from zoo.cost.operators import Work
from zoo.cost.products import pass_s, product_s
from zoo.cost.reading import read_transformer, transformer_of
from zoo.cost.software import EAGER, LEAN, SOFTWARE, Software
from zoo.cost.step import Layout, StepTime, step_time
from zoo.cost.transformer import Fused, Pass, Product, Transformer, backward_of, forward_of_layer, kept_of_layer

__all__ = [
    "EAGER", "LEAN", "SOFTWARE", "Calibration", "Channel", "Device", "Forecasted", "Fused", "Goodput", "Hardware",
    "HardwareError", "Layout", "Link", "Measured", "Memory", "Pass", "Product", "Run", "Software", "StepTime", "Tile",
    "Transformer", "Work", "backward_of", "calibrate", "forecast_layout", "forward_of_layer", "goodput", "hardware",
    "hardware_names", "kept_of_layer", "layouts", "memory_of", "nearest", "pass_s", "product_s", "read_transformer",
    "seconds", "step_time", "transformer_of", "wire_bytes",
]  # fmt: skip

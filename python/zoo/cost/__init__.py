"""What a computation, a message and a step cost: bytes, floating-point operations and seconds, without torch."""

from zoo.cost.calibrate import Calibration, Run, calibrate
from zoo.cost.collectives import seconds, wire_bytes
from zoo.cost.hardware import Device, Hardware, HardwareError, Link, Measured, Tile, hardware, hardware_names
from zoo.cost.memory import Memory, memory_of
from zoo.cost.products import pass_s, product_s
from zoo.cost.software import LEAN, Software
from zoo.cost.step import Layout, StepTime, step_time
from zoo.cost.transformer import Fused, Pass, Product, Transformer, backward_of, forward_of_layer, kept_of_layer

__all__ = [
    "LEAN", "Calibration", "Device", "Fused", "Hardware", "HardwareError", "Layout", "Link", "Measured", "Memory",
    "Pass", "Product", "Run", "Software", "StepTime", "Tile", "Transformer", "backward_of", "calibrate",
    "forward_of_layer", "hardware", "hardware_names", "kept_of_layer", "memory_of", "pass_s", "product_s", "seconds",
    "step_time", "wire_bytes",
]  # fmt: skip

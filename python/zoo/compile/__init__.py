"""A model as one graph of torch.compile, at every ZeRO stage: the runtime's events are nodes of it.

See ``README.md``.
"""

from zoo.compile.checking import PassError, check
from zoo.compile.contract import PassContract, compile_pass, register_compile_pass, validate_schedule
from zoo.compile.plan import GraphPlan
from zoo.compile.whole import WholeGraph, compile_whole

__all__ = [
    "GraphPlan", "PassContract", "PassError", "WholeGraph", "check", "compile_pass", "compile_whole", "register_compile_pass",
    "validate_schedule",
]  # fmt: skip

"""A model as one graph of torch.compile, at every ZeRO stage: the runtime's events are nodes of it.

Imported when they are asked for, because every configuration may look at the section.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.compile.checking import PassError, check
    from zoo.compile.config import CompileConfig
    from zoo.compile.contract import PassContract, compile_pass, register_compile_pass, validate_schedule
    from zoo.compile.plan import GraphPlan
    from zoo.compile.uses import use_dtypes
    from zoo.compile.whole import WholeGraph, compile_whole

__all__ = [
    "CompileConfig",
    "GraphPlan",
    "PassContract",
    "PassError",
    "WholeGraph",
    "check",
    "compile_pass",
    "compile_whole",
    "register_compile_pass",
    "use_dtypes",
    "validate_schedule",
]

_WHERE = {
    "CompileConfig": "config", "GraphPlan": "plan", "WholeGraph": "whole", "compile_whole": "whole",
    "use_dtypes": "uses",
    **dict.fromkeys(("PassError", "check"), "checking"),
    **dict.fromkeys(("PassContract", "compile_pass", "register_compile_pass", "validate_schedule"), "contract"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"zoo.compile.{_WHERE[name]}"), name)

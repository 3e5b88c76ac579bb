"""The section ``flops_profiler`` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from zoo.config import Section
from zoo.config.fates import Fate, unnecessary
from zoo.config.section import OWN

__all__ = ["FlopsProfilerConfig"]


class FlopsProfilerConfig(Section):
    """One step of training is profiled, on the first rank: FLOPs, seconds and parameters of each module."""

    enabled: bool = False
    """Profile the step ``profile_step``."""

    recompute_fwd_factor: float = Field(default=0.0, ge=0)
    """Forwards that backward computes again, for utilisation where no backward is measured."""

    profile_step: int = Field(default=1, ge=0)
    """Profile after so many steps: the first one is 0, and is slower than those after it."""

    module_depth: int = Field(default=-1, ge=-1)
    """Down to which depth the largest modules are printed; -1: down to the innermost."""

    top_modules: int = Field(default=1, ge=1)
    """How many classes of modules are printed at each depth."""

    detailed: bool = True
    """Print the tree of modules too."""

    output_file: str | None = None
    """Write to this file what would be printed."""

    json_file: Annotated[str | None, OWN] = None
    """Write the whole profile to this file, as JSON."""

    flame_file: Annotated[str | None, OWN] = None
    """Write a flame graph of the FLOPs to this file, one page of HTML."""

    peak_tflops: Annotated[float | None, OWN] = Field(default=None, gt=0)
    """Of a device, dense products in the dtype that is used, 10¹² a second: utilisation is printed."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "step": unnecessary(
            "profile_step says which step; some programs write this, which DeepSpeed does not read", None, int
        ),
    }

"""With ``ZOO_WHEEL_KERNELS=cpu`` in the environment the CPU library is compiled into the wheel; without it, nothing is.

The library fits one version of torch, that of the environment which builds, so it has to be a build without isolation:

    ZOO_WHEEL_KERNELS=cpu pip wheel --no-build-isolation --no-deps cuda/
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WithKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Adds two files to the wheel, which then is for one kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        asked = os.environ.get("ZOO_WHEEL_KERNELS", "")
        if not asked:
            return
        if asked != "cpu":
            raise ValueError(f"ZOO_WHEEL_KERNELS={asked}; it must be cpu, or not be set.")
        if version == "editable":
            return  # What runs from the sources compiles them.
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise RuntimeError("ZOO_WHEEL_KERNELS=cpu needs the torch here: give --no-build-isolation.") from error
        sys.path.insert(0, self.root)
        import zoo

        # The sources that are packed, not those that this environment may have installed.
        zoo.__path__ = [str(Path(self.root) / "zoo"), *zoo.__path__]
        from zoo.kernels.building import build_ahead

        for python in (False, True):
            library = build_ahead(Path(self.directory) / "ahead", python=python)
            build_data["force_include"][str(library)] = f"zoo/kernels/ahead/{library.name}"
        build_data["pure_python"] = False
        # Nothing of Python is in the kernels, so that one wheel is for all versions. The module of classes is for the
        # one that builds, and its name says so: others compile theirs, or go without.
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"

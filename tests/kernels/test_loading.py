"""Who runs, native operation or reference: what decides it is asked once and not in every call."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import processes
from tests.kernels.conftest import UseMode

from zoo.kernels import building, loading
from zoo.kernels.norm import sum_squares

native = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")


class NotAsked(dict[str, str]):
    """An environment that nobody may look at."""

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError(f"the environment was asked for {args}")

    get = __getitem__ = __contains__ = __iter__ = _refuse


def refuse(*args: Any) -> bool:
    raise AssertionError(f"the dispatcher was asked for {args}")


@native
@pytest.mark.parametrize("mode", loading.MODES)
def test_a_call_asks_neither_the_environment_nor_the_dispatcher(
    mode: str, use_mode: UseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mode(mode)
    monkeypatch.setattr(loading, "_cuda_operations", frozenset({"sum_squares"}))
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.float32)
    monkeypatch.setattr(os, "environ", NotAsked())
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", refuse)
    runs = mode != "reference"
    assert loading.runs("sum_squares", torch.ones(1)) is runs
    assert loading.runs("sum_squares", on_gpu) is runs
    assert not loading.runs("quantise", on_gpu)
    assert float(sum_squares([torch.full((3,), 2.0)])[0]) == 12.0


@native
def test_the_operations_for_cuda_are_those_that_its_library_registered(
    use_mode: UseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mode("auto")
    monkeypatch.setattr(loading, "_cuda_operations", None)
    monkeypatch.setattr(building, "build_cuda_library", lambda architectures: "library")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    asked = torch._C._dispatch_has_kernel_for_dispatch_key
    monkeypatch.setattr(
        torch._C,
        "_dispatch_has_kernel_for_dispatch_key",
        lambda name, key: name == "zoo::quantise" if key == "CUDA" else asked(name, key),
    )
    assert not loading.has_cuda_kernel("quantise")
    loading.load_cuda((90,))
    assert loading.has_cuda_kernel("quantise")
    assert not loading.has_cuda_kernel("sum_squares")


@native
def test_other_threads_see_the_library_when_its_gradients_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.kernels import operators

    library, seen = loading._library, []
    monkeypatch.setattr(loading, "_library", None)
    monkeypatch.setattr(loading, "_open_library", lambda: library)
    monkeypatch.setattr(operators, "register", lambda: seen.append(loading._library))
    assert loading.native()
    assert seen == [None]
    assert loading._library is library


def test_the_environment_decides_when_the_first_operation_runs() -> None:
    """And a block with another mode ends with what was before it."""
    program = (
        "import os, torch\n"
        "from zoo.kernels import loading\n"
        "os.environ['ZOO_KERNELS'] = 'reference'\n"
        "found = [loading.native()]\n"
        "os.environ['ZOO_KERNELS'] = 'wrong'\n"
        "found.append(loading.native())\n"
        "with loading.use_mode('auto'): found.append(loading.mode())\n"
        "print(found, loading.mode())"
    )
    assert processes.run(program, check=True).stdout == "[False, False, 'auto'] reference\n"


def test_a_mode_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode 'fast'; it must be auto, native or reference"), loading.use_mode("fast"):
        pass
    monkeypatch.setattr(loading, "_mode", None)
    monkeypatch.setenv("ZOO_KERNELS", "fast")
    with pytest.raises(ValueError, match="ZOO_KERNELS=fast; it must be auto, native or reference"):
        loading.runs("sum_squares", torch.ones(1))

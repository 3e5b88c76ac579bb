"""The CUDA library: compiled, linked and loaded without a GPU; what its building refuses; who runs where it is not."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import processes
from tests.kernels.conftest import UseMode

from zoo.kernels import building, loading
from zoo.kernels.building import BuildError, Plan, build, cuda_plan
from zoo.kernels.building.cuda import DEFAULT_ARCHITECTURES
from zoo.kernels.building.cuda_library import built_for, find_runtime, include_folders
from zoo.kernels.building.plan import Unit


def why_not() -> str:
    """Why the library cannot be built here, if so."""
    try:
        cuda_plan(DEFAULT_ARCHITECTURES)
    except BuildError as error:
        return str(error)
    return "" if loading.native() else f"no native kernels here: {loading.why_not()}"


LOAD = """
import torch
from zoo.kernels import loading
from zoo.kernels.building.cuda import DEFAULT_ARCHITECTURES
def runtimes():
    with open("/proc/self/maps") as file:
        return {line.split()[-1] for line in file if "libcudart" in line}
loading.native()
of_torch = runtimes()
before = [name for name in loading.operations() if loading.has_cuda_kernel(name)]
loading.load_cuda(DEFAULT_ARCHITECTURES)
print(before, [name for name in loading.operations() if not loading.has_cuda_kernel(name)], runtimes() == of_torch)
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")
def test_after_loading_every_operation_has_a_kernel_for_cuda_and_no_second_runtime() -> None:
    """``make kernels-check``, which CI runs before the tests, compiles the library; that takes minutes."""
    if built_for(cuda_plan(DEFAULT_ARCHITECTURES), DEFAULT_ARCHITECTURES) is None:
        pytest.skip("the CUDA library is not compiled here; `make kernels-check test-python` compiles and tests it")
    result = processes.run(LOAD, timeout=1200)
    assert result.stdout == "[] [] True\n", result.stderr


def test_an_undefined_symbol_is_an_error_of_the_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "one.cpp"
    source.write_text("int nowhere(); int somewhere() { return nowhere(); }")
    unit = Unit(name="one", source=source, flags=("-fPIC",))
    flags = ("-shared", "-Wl,-z,defs")
    with pytest.raises(BuildError, match="undefined reference to `nowhere"):
        build(Plan(name="tiny", compiler=("c++",), units=(unit,), link_flags=flags, key="tiny"), quiet=True)


def test_the_link_refuses_undefined_symbols() -> None:
    if why_not():
        pytest.skip(why_not())
    assert "-Wl,-z,defs" in cuda_plan((90,)).link_flags


def test_what_cannot_be_linked_is_refused_with_the_versions() -> None:
    nvcc = Path("/somewhere/bin/nvcc")
    with pytest.raises(BuildError, match="torch is built without CUDA"):
        find_runtime(None, "release 13.2, V13.2.86", nvcc)
    with pytest.raises(BuildError, match=r"/somewhere/bin/nvcc is of CUDA 12 and torch of CUDA 13.0; .* one major"):
        find_runtime("13.0", "Cuda compilation tools, release 12.4, V12.4.131", nvcc)
    with pytest.raises(BuildError, match=r"libcudart.so.99 is not there \(looked in .*/somewhere/lib64"):
        find_runtime("99.1", "release 99.0, V99", nvcc)


def test_a_library_of_more_architectures_serves_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path))
    plan = Plan(name="tiny", compiler=(), units=(), link_flags=(), key="tiny-0123-sm90")
    folder = tmp_path / "kernels/tiny-0123-sm80.90.100"
    folder.mkdir(parents=True)
    assert built_for(plan, (90,)) is None  # unfinished
    (folder / "tiny.so").touch()
    assert built_for(plan, (90,)) == folder / "tiny.so"
    assert built_for(plan, (80, 100)) == folder / "tiny.so"
    assert built_for(plan, (90, 120)) is None
    assert built_for(plan, (8,)) is None


def on_gpu(dtype: torch.dtype = torch.float32) -> Any:
    """As much of a tensor on a GPU as the decision looks at."""
    return SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype)


@pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
def test_without_nvcc_the_reference_runs_on_the_gpu_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, use_mode: UseMode
) -> None:
    def refuse(architectures: Any) -> Path:
        assert architectures == (90, 91)
        raise BuildError("there is no nvcc")

    monkeypatch.setattr(building, "build_cuda_library", refuse)
    monkeypatch.setattr(loading, "_why_not_cuda", None)
    monkeypatch.setattr(loading, "_cuda_operations", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, i))
    use_mode("auto")
    with caplog.at_level(logging.WARNING, "zoo.kernels"):
        assert not loading.runs("update_", on_gpu())
        assert not loading.runs("update_", on_gpu())
    assert caplog.text.count("native operations for CUDA cannot be used") == 1
    assert "there is no nvcc" in caplog.text
    use_mode("native")
    assert not loading.runs("update_", on_gpu(torch.float64))
    with pytest.raises(BuildError, match="ZOO_KERNELS=native, but there is no nvcc"):
        loading.runs("update_", on_gpu())
    assert loading.runs("update_", torch.ones(1))


def test_the_headers_of_the_runtime_are_found_in_one_folder_or_in_two(tmp_path: Path) -> None:
    def folder(name: str, *headers: str) -> Path:
        for header in headers:
            (tmp_path / name / header).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / header).touch()
        return tmp_path / name

    runtime = folder("torch", "cuda_runtime_api.h")
    compiler = folder("wheel", "crt/host_defines.h")
    nvcc = tmp_path / "wheel-of-nvcc/bin/nvcc"
    with pytest.raises(BuildError, match=r"cuda_runtime_api.h is not beside .*wheel-of-nvcc/bin/nvcc"):
        include_folders(nvcc, [f"-I{compiler}"])
    assert include_folders(nvcc, [f"-I{compiler}", f"-I{runtime}"]) == [runtime, compiler]
    toolkit = folder("toolkit/include", "cuda_runtime_api.h", "crt/host_defines.h")
    assert include_folders(tmp_path / "toolkit/bin/nvcc", [f"-I{runtime}"]) == [toolkit]

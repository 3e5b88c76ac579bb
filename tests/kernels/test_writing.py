"""The page "write a kernel": its files build, pass its test and, where there is an nvcc, link for CUDA."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zoo.kernels import loading
from zoo.kernels.building import BuildError, cpu_plan, cuda_plan
from zoo.kernels.building.plan import ISAS, SOURCES, find_compiler

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^### `([\w./]+)`\n+```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOR_CUDA = """
from zoo.kernels import loading
loading.load_cuda((90,))
print([name for name in loading.operations() if loading.has_cuda_kernel(name)])
"""
REGISTERS = """
from zoo.kernels.building import build_cuda, usage_of
print(max(usage.registers for path, _ in build_cuda((90,)) for usage in usage_of(path)))
"""


def files() -> dict[str, str]:
    """Path → text, as the page has them."""
    return dict(SECTION.findall((ROOT / "cuda/WRITING.md").read_text(encoding="utf-8")))


def cuda_is_missing() -> str:
    """Why nothing can be linked for CUDA here, if so."""
    try:
        cuda_plan((90,))
    except BuildError as error:
        return str(error)
    return ""


def run(folder: Path, *command: str) -> str:
    environment = {
        **os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "ZOO_CACHE_DIR": str(folder / "cache"),
        "ZOO_KERNELS": "native",
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
def test_the_kernel_of_the_page_builds_and_passes_its_test(tmp_path: Path) -> None:
    package = tmp_path / "zoo/kernels"
    for name in ("common", "building"):
        shutil.copytree(SOURCES / name, package / name)
    for path in SOURCES.glob("*.py"):
        shutil.copy(path, package)
    for name, text in files().items():
        path = tmp_path / name if name.startswith("tests/") else package / name
        if not name.startswith("benchmarks/"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    test = tmp_path / "test_squared_relu.py"  # beside the tests of this repository, which it imports from
    (tmp_path / "tests/kernels/test_squared_relu.py").rename(test)
    shutil.rmtree(tmp_path / "tests")
    said = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test.name)
    assert re.search(r"5 passed", said), said
    assert "skipped" not in said
    if not cuda_is_missing():
        assert run(tmp_path, "-c", FOR_CUDA) == "['squared_relu', 'squared_relu_backward']\n"
        limit = re.search(r"256 threads, <= (\d+) registers", files()["squared_relu/squared_relu.h"])
        assert limit
        assert int(run(tmp_path, "-c", REGISTERS)) <= int(limit[1])


def test_the_benchmark_of_the_page_compares_the_same_thing() -> None:
    stages = ast.parse((ROOT / "benchmarks/gpu/stages.py").read_text(encoding="utf-8"))
    normal = [node for node in stages.body if isinstance(node, ast.FunctionDef) and node.name == "normal"]
    names = {"torch": torch, "Sequence": list, "Tensor": torch.Tensor, "Contenders": dict[str, Callable[[], object]]}
    exec(files()["squared_relu/reference.py"].replace("from __future__ import annotations", ""), names)
    exec(ast.unparse(ast.Module(normal, [])), names)
    exec(files()["benchmarks/gpu/stages.py"], names)
    contenders, num_bytes = names["squared_relu_forward"]("cpu", 100, torch.float32)  # type: ignore[operator]
    assert num_bytes == 800
    torch.testing.assert_close(contenders["zoo"](), contenders["torch"]())


def test_the_page_has_a_file_for_each_row_of_its_table_and_folders_look_like_it() -> None:
    ours = {Path(name).name.replace("squared_relu", "NAME") for name in files() if name.startswith("squared_relu/")}
    page = (ROOT / "cuda/WRITING.md").read_text(encoding="utf-8")
    assert ours == set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    # bias_gelu stands for those that are one operation with a gradient.
    assert ours == {
        path.name.replace("bias_gelu", "NAME") for path in (SOURCES / "bias_gelu").iterdir() if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.skipif(not loading.isas(), reason=f"no native kernels here: {loading.why_not()}")
def test_what_is_compiled_for_an_instruction_set_has_its_name(tmp_path: Path) -> None:
    """Else the linker could take it for the plain function of that name, on a processor that cannot run it."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    isa = list(ISAS)[-1]
    units = [unit for unit in cpu_plan().units if unit.name.endswith(f"-{isa}")]
    assert len(units) > 9
    for unit in units:
        target = tmp_path / f"{unit.name}.o"
        subprocess.run([*find_compiler(), *unit.flags, "-c", str(unit.source), "-o", str(target)], check=True)
        said = subprocess.run(["nm", "--defined-only", str(target)], capture_output=True, text=True, check=True).stdout
        shared = [line.split()[-1] for line in said.splitlines() if line.split()[-2] in "TWVuBDi"]
        assert shared
        assert [name for name in shared if isa not in name and not name.startswith("DW.ref.")] == [], unit.name

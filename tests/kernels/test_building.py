"""Building: once, whoever asks; and a sentence where it cannot be done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import processes

from zoo.kernels.building import BuildError, Plan, build, build_cuda, cpu_plan, find_nvcc, parse_architectures
from zoo.kernels.building.cuda import cuda_sources
from zoo.kernels.building.plan import Unit

SOURCE = """
extern "C" int answer() { return 42; }
"""
# A compiler that notes every call, so that a test can count them.
NOTING = """#!/bin/sh
echo "$@" >> "{log}"
{before}
exec c++ "$@"
"""
ASK = """
import sys
from pathlib import Path
from zoo.kernels.building import Plan, build
from zoo.kernels.building.plan import Unit
compiler, source = sys.argv[1:3]
unit = Unit(name="one", source=Path(source), flags=("-fPIC",))
build(Plan(name="tiny", compiler=(compiler,), units=(unit,), link_flags=("-shared",), key="tiny-1"))
"""


def tiny(tmp_path: Path, before: str = "") -> Plan:
    source, log, compiler = tmp_path / "a b.cpp", tmp_path / "log", tmp_path / "noting"
    source.write_text(SOURCE)
    compiler.write_text(NOTING.format(log=log, before=before))
    compiler.chmod(0o755)
    unit = Unit(name="one", source=source, flags=("-fPIC", "-DTEXT=a b$c"))
    return Plan(name="tiny", compiler=(str(compiler),), units=(unit,), link_flags=("-shared",), key="tiny-1")


def calls(tmp_path: Path) -> int:
    return sum("-c" in line.split() for line in (tmp_path / "log").read_text().splitlines())


def ask(plan: Plan, cache: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "ZOO_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", ASK, plan.compiler[0], str(plan.units[0].source)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)


def test_a_plan_is_built_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "cache"))
    plan = tiny(tmp_path)
    library = build(plan)
    assert library.exists()
    assert [p.name for p in library.parent.iterdir()] == ["tiny.so"]
    assert capfd.readouterr().err.count("zoo: ") == 2  # begun, done
    assert build(plan) == library
    assert calls(tmp_path) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.dear
def test_ranks_that_start_together_build_once(tmp_path: Path) -> None:
    plan = tiny(tmp_path, before="sleep 0.5")
    ranks = [ask(plan, tmp_path / "cache") for _ in range(4)]
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0, 0]
    assert calls(tmp_path) == 1


@pytest.mark.dear
def test_a_builder_that_dies_blocks_nobody(tmp_path: Path) -> None:
    plan = tiny(tmp_path, before=f'[ -e "{tmp_path}/again" ] || sleep 30')
    first = ask(plan, tmp_path / "cache")
    while not (tmp_path / "log").exists():
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    (tmp_path / "again").touch()
    assert ask(plan, tmp_path / "cache").wait(60) == 0
    assert sorted(p.name for p in (tmp_path / "cache/kernels").iterdir()) == ["tiny-1", "tiny-1.lock"]


def test_a_compiler_that_fails_is_an_error_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "cache"))
    plan = tiny(tmp_path)
    plan.units[0].source.write_text("int broken = ;")
    with pytest.raises(BuildError, match=r"noting failed on tiny:[\s\S]*error: expected"):
        build(plan, quiet=True)
    assert not (tmp_path / "cache/kernels/tiny-1").exists()
    plan.units[0].source.write_text(SOURCE)
    assert build(plan, quiet=True).exists()


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot be written.*ZOO_CACHE_DIR"):
        build(tiny(tmp_path))


def test_no_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(BuildError, match="CXX=no-such-compiler -x is not a program"):
        cpu_plan()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        cpu_plan()


def test_the_key_covers_flags_and_nothing_is_tuned_to_this_machine() -> None:
    plain, checked = cpu_plan(), cpu_plan(sanitize=True)
    assert plain == cpu_plan()
    assert plain.key != checked.key
    assert not [flag for unit in plain.units for flag in unit.flags if "native" in flag]


def test_without_a_compiler_the_reference_runs_and_says_so_once() -> None:
    code = (
        "import torch, zoo.kernels.update as u\n"
        "p = torch.ones(3)\n"
        "for _ in range(2): u.update_(u.Rule.SGD, u.Flag.NONE, [p], [torch.ones(3)], [], scalars=u.Scalars(rate=0.5))\n"
        "print(p.tolist())"
    )
    environment = {**os.environ, "CXX": "no-such-compiler"}
    environment.pop("ZOO_KERNELS", None)
    result = processes.run(code, env=environment, check=True)
    assert result.stdout == "[0.0, 0.0, 0.0]\n"
    assert result.stderr.count("native operations cannot be used") == 1
    assert "CXX=no-such-compiler" in result.stderr
    environment["ZOO_KERNELS"] = "native"
    result = processes.run(code, env=environment)
    assert "BuildError: ZOO_KERNELS=native, but CXX=no-such-compiler" in result.stderr


@pytest.mark.long
def test_architectures_are_read_or_refused() -> None:
    assert parse_architectures("80, sm_90,80") == (80, 90)
    for text in ("", "8.0", "90a", "12"):
        with pytest.raises(ValueError, match=f"--cuda-arch {text}: it must be"):
            parse_architectures(text)


def test_without_nvcc_the_sentence_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BuildError, match=r"no nvcc .*CUDA_HOME.*zoo-kernels\[nvcc\]"):
        find_nvcc()


FAKE_NVCC = """#!/bin/sh
[ "$1" = --version ] && {{ echo fake 1; exit 0; }}
echo "$@" >> "{log}"
[ -e "{broken}" ] && {{ echo "file.cu(3): error: no" >&2; exit 1; }}
while [ "$1" != -o ]; do shift; done
echo object > "$2"
"""


def test_cuda_sources_are_compiled_once_for_all_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, broken = tmp_path / "log", tmp_path / "broken"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text(FAKE_NVCC.format(log=log, broken=broken))
    (tmp_path / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "cache"))
    broken.touch()
    with pytest.raises(BuildError, match=r"file.cu\(3\): error: no"):
        build_cuda([80, 90])
    broken.unlink()
    log.unlink()
    made = build_cuda([80, 90])
    assert [new for _, new in made] == [True] * len(cuda_sources())
    lines = log.read_text().splitlines()
    assert len(lines) == len(cuda_sources()) >= 2
    assert all("code=sm_80" in line and "code=sm_90" in line and "-fmad=false" in line for line in lines)
    assert [(path, False) for path, _ in made] == build_cuda([80, 90])
    assert all(new for _, new in build_cuda([100]))


def test_no_kernel_source_includes_torch() -> None:
    # The bindings, and what they share, are the only files that know of tensors.
    allowed = {"binding.cpp", "checks.h", "operators.h", "plan.h", "python.cpp", "python.h"}
    for path in (p for p in cuda_sources()[0].parents[1].glob("*/*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")):
        text = path.read_text()
        assert path.name in allowed or not any(f"#include <{x}" in text for x in ("torch", "ATen", "c10")), path

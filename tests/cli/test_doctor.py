"""zoo doctor: each finding, what is said where something is missing, and that nothing ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zoo.cli import app
from zoo.cli.doctor import asking, examining, machine, software, torch_side, transfers
from zoo.cli.doctor.report import SECTIONS, Finding, Report, State, human

FINDINGS = st.builds(
    Finding,
    section=st.sampled_from(SECTIONS),
    name=st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=12),
    value=st.text(max_size=200),
    state=st.sampled_from(list(State)),
    remedy=st.text(max_size=80),
)


def finding(state: State = State.OK, remedy: str = "", name: str = "a thing") -> Finding:
    return Finding(section="kernels", name=name, value="as it is", state=state, remedy=remedy)


# -- the report -------------------------------------------------------------------------------------------------------


@given(st.lists(FINDINGS))
def test_a_report_comes_back_from_json(findings: list[Finding]) -> None:
    report = Report(tuple(findings))
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert sorted(again.findings, key=repr) == sorted(findings, key=repr)
    assert again.to_dict() == report.to_dict()
    assert again.healthy is not any(found.state is State.BROKEN for found in findings)
    assert again.text() == report.text()


def test_the_text_has_each_remedy_below_its_finding_and_a_verdict() -> None:
    broken = finding(State.BROKEN, "pip install it", "torch")
    report = Report((finding(), broken, finding(State.ABSENT, "pip install other"), finding(State.LIMITED)))
    assert report.text().splitlines() == [
        "kernels",
        "  ok       a thing                   as it is",
        "  broken   torch                     as it is",
        "           -> pip install it",
        "  absent   a thing                   as it is",
        "           -> pip install other",
        "  limited  a thing                   as it is",
        "",
        "zoo does not work here as it should: torch (1 limited, 1 optional absent).",
    ]
    assert Report((finding(),)).verdict() == "zoo works here."
    assert report.text(problems=False).splitlines() == ["kernels", "  ok       a thing                   as it is"]


def test_what_is_no_finding() -> None:
    with pytest.raises(ValueError, match="section 'weather'; allowed are versions, devices"):
        Finding(section="weather", name="rain", value="some")
    with pytest.raises(ValueError, match="a finding has the keys name, remedy"):
        Finding.from_dict({"section": "kernels"})


def test_sizes_for_people() -> None:
    assert [human(size) for size in (0, 1023, 2048, 3 << 29, 1 << 50)] == [
        "0 B", "1023 B", "2.0 KiB", "1.5 GiB", "1024.0 TiB",
    ]  # fmt: skip


# -- versions and packages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "specifier", "fits"),
    [
        ("2.15.0+cu132", ">=2.11", True), ("2.10.1", ">=2.11", False), ("2.7", ">=2.7,<3", True),
        ("3.0", ">=2.7,<3", False), ("0.1.0", "==0.1.0", True), ("0.1", "==0.1.0", True), ("13.2.7", "==13.2.*", True),
        ("13.3", "==13.2.*", False), ("2.4.6", "~=2.4", True), ("3.0", "~=2.4", False), ("1.0rc1", ">=1.0", True),
        ("5.0", "", True), ("1.2", "!=1.2", False),
    ],
)  # fmt: skip
def test_versions_are_compared_as_numbers(version: str, specifier: str, fits: bool) -> None:
    assert software.satisfies(version, specifier) is fits


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_exactly_one_order_holds(a: list[int], b: list[int]) -> None:
    here, asked = ".".join(map(str, a)), ".".join(map(str, b))
    assert sum(software.satisfies(here, operator + asked) for operator in ("<", "==", ">")) == 1
    assert software.satisfies(here, ">=" + asked) is not software.satisfies(here, "<" + asked)


def test_a_python_that_is_too_old_and_one_that_is_newer() -> None:
    assert software.python((3, 9, 1)).state is State.BROKEN
    assert "3.10 to 3.13" in software.python((3, 9, 1)).value
    assert software.python((3, 14, 0)).state is State.LIMITED
    assert software.python((3, 10, 0)).remedy == ""


def asker(**versions: str) -> Any:
    def ask(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    return ask


def test_a_distribution_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_sources_are_on_the_path", lambda name: name == "zoo-core")
    found = {f.name: f for f in software.distributions(asker(zoo_moe="0.1.0"))}
    assert found["zoo-core"].state is State.LIMITED
    assert "sources are on the path" in found["zoo-core"].value
    assert found["zoo-kernels"].state is State.BROKEN
    assert found["zoo-kernels"].remedy.startswith("pip install ./cuda")
    assert found["zoo-moe"].value == "0.1.0"
    assert found["zoo-compression"].state is State.ABSENT


def test_dependencies_and_extras() -> None:
    lines = {
        "zoo-core": [
            "torch>=2.11", "numpy (>=1.26)", "zoo-kernels==0.1.0", "rich>=13", "wandb>=0.19.10 ; extra == 'wandb'",
            "trl>=1.16; python_full_version >= '3.99' and extra == 'clients'", "peft>=0.21 ; extra == 'clients'",
        ],
    }  # fmt: skip

    def requires(name: str) -> list[str]:
        if name not in lines:
            raise metadata.PackageNotFoundError(name)
        return lines[name]

    ask = asker(torch="2.10.0", numpy="2.0", peft="0.21.2")
    found = {f.name: f for f in software.dependencies(ask, requires)}
    assert set(found) == {"torch", "numpy", "rich", "zoo-core[wandb]", "zoo-core[clients]"}
    assert (found["torch"].section, found["torch"].state) == ("versions", State.BROKEN)
    assert (found["torch"].value, found["torch"].remedy) == (
        "2.10.0, and zoo needs >=2.11",
        "pip install 'torch>=2.11'",
    )
    assert (found["numpy"].value, found["numpy"].state) == ("2.0", State.OK)
    assert (found["rich"].value, found["rich"].remedy) == ("not installed", "pip install 'rich>=13'")
    assert found["zoo-core[wandb]"].state is State.ABSENT
    assert found["zoo-core[wandb]"].remedy == "pip install 'wandb>=0.19.10'"
    assert found["zoo-core[clients]"].value == "peft 0.21.2"


def test_programs_that_are_missing() -> None:
    found = {f.name: f for f in software.tools(lambda name: "/usr/bin/fio" if name == "fio" else None)}
    assert set(found) == {"g++", "fio"}
    assert (found["g++"].state, found["g++"].remedy) == (State.ABSENT, "apt-get install g++")
    assert found["fio"].state is State.OK


# -- the machine ------------------------------------------------------------------------------------------------------


def write(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_smallest_limit_of_a_cgroup_on_the_way_up(tmp_path: Path) -> None:
    base = "sys__fs__cgroup__"
    root = write(tmp_path, **{
        "proc__self__cgroup": "0::/a/b\n", f"{base}a__memory_dot_max": "1073741824\n",
        f"{base}a__memory_dot_current": "1048576\n", f"{base}a__b__memory_dot_max": "max\n",
        f"{base}a__b__cpu_dot_max": "150000 100000\n",
    })  # fmt: skip
    found = {f.name: f.value for f in machine.group_limits(root)}
    assert found["memory of the cgroup"].startswith("1.0 GiB, 1.0 MiB used")
    assert found["CPU of the cgroup"] == "1.5 processors by quota"


def test_a_cgroup_of_version_1_and_one_without_limits(tmp_path: Path) -> None:
    base = "sys__fs__cgroup__memory__"
    texts = {
        "proc__self__cgroup": "4:memory:/x\n0::/\n", f"{base}x__memory_dot_limit_in_bytes": "9223372036854771712\n",
        f"{base}memory_dot_limit_in_bytes": "2147483648\n", f"{base}memory_dot_usage_in_bytes": "0\n",
    }  # fmt: skip
    found = {f.name: f.value for f in machine.group_limits(write(tmp_path, **texts))}
    assert found["memory of the cgroup"].startswith("2.0 GiB")
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (unlimited,) = machine.group_limits(tmp_path)
    assert unlimited.value == "unlimited"
    assert list(machine.group_limits(tmp_path / "nowhere")) == []


def test_the_processor_of_another_machine(tmp_path: Path) -> None:
    texts = {
        "proc__cpuinfo": "model name\t: A Chip\nflags\t\t: fpu avx2 avx512f\n",
        "proc__meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n",
    }
    found = {f.name: f.value for f in machine.processor(write(tmp_path, **texts))}
    assert found["CPU"].startswith("A Chip, ")
    assert found["CPU"].endswith("; avx2 avx512f")
    assert found["memory"] == "2.0 MiB, 1.0 MiB available"
    assert [f.name for f in machine.processor(tmp_path / "nowhere")] == ["CPU"]
    assert machine.processor_name(tmp_path) == "A Chip"
    assert machine.memory_bytes(tmp_path) == 2 << 20
    write(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__memory_dot_max="1048576\n")
    assert machine.memory_bytes(tmp_path) == 1 << 20
    assert machine.memory_bytes(tmp_path / "nowhere") == 0


def test_shared_memory_that_is_small_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = machine.shared_memory(tmp_path / "nowhere")
    assert gone.state is State.LIMITED
    assert "mount" in gone.remedy
    size = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=100)
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    small = machine.shared_memory()
    assert (small.state, small.value.split(",")[0]) == (State.LIMITED, "/dev/shm holds 64.0 MiB")


def test_limits_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    locked, files = machine.resources()
    assert (locked.state, files.state) == (State.LIMITED, State.LIMITED)
    assert locked.remedy.startswith("ulimit -l")
    assert files.remedy == "ulimit -n 4096"


def test_variables_are_told_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    found = {f.name: f.value for f in machine.variables()}
    assert found["NCCL_DEBUG"] == "INFO"
    assert "a secret" not in found.values()


# -- transfers --------------------------------------------------------------------------------------------------------


def test_transfers_of_this_machine(tmp_path: Path) -> None:
    found = {f.name: f for f in transfers.transfers(tmp_path, gpus=False)}
    assert list(found) == ["Rust module", "io_uring", "direct transfers", "page-locked memory", "GPUDirect Storage"]
    assert not [f for f in found.values() if f.state is State.BROKEN]
    assert str(tmp_path) in found["direct transfers"].value
    assert not any(tmp_path.iterdir())


def test_a_rust_module_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import zoo.io

    monkeypatch.delattr(zoo.io, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "zoo.io._native", None)
    (found,) = transfers.transfers(tmp_path, gpus=False)
    assert (found.name, found.state) == ("Rust module", State.BROKEN)
    assert "pip install" in found.remedy


class Refusing:
    """A Rust module on a machine that has nothing."""

    @staticmethod
    def Engine(*, backend: str, **_: object) -> None:
        raise RuntimeError(f"{backend} is refused\nfor a reason")

    @staticmethod
    def File(*_: object) -> Any:
        return SimpleNamespace(alignment=None, why_buffered="it is a tmpfs", close=lambda: None)

    @staticmethod
    def cuda_problem() -> str:
        return "no CUDA runtime"


def test_a_machine_that_refuses(tmp_path: Path) -> None:
    switch = tmp_path / "io_uring_disabled"
    ring = transfers._ring(Refusing, switch)
    assert (ring.state, ring.value) == (State.LIMITED, "uring is refused; transfers run on blocking threads")
    assert "seccomp" in ring.remedy
    switch.write_text("2\n")
    assert transfers._ring(Refusing, switch).remedy.startswith("sysctl -w kernel.io_uring_disabled=0")
    direct = transfers._direct(Refusing, tmp_path)
    assert (direct.state, "it is a tmpfs" in direct.value) == (State.LIMITED, True)
    assert "cannot be written" in transfers._direct(Refusing, tmp_path / "nowhere").value
    for gpus, states in ((True, (State.LIMITED, State.ABSENT)), (False, (State.FACT, State.FACT))):
        found = transfers._pinning(Refusing, gpus), transfers._gpu_direct(Refusing, gpus)
        assert tuple(f.state for f in found) == states
        assert all(bool(f.remedy) is gpus for f in found)


# -- torch, asked from outside ----------------------------------------------------------------------------------------


def ask(program: str, tmp_path: Path, patience_s: float = 60.0) -> list[Finding]:
    return asking.ask_torch(tmp_path, patience_s=patience_s, command=(sys.executable, "-S", "-c", program))


def test_a_torch_that_is_missing_breaks_or_hangs_is_a_sentence(tmp_path: Path) -> None:
    asks = """import json; print(json.dumps({"asks": "torch"}), flush=True)\n"""
    (missing,) = ask(asks + "import torch", tmp_path)
    assert (missing.name, missing.state) == ("torch", State.BROKEN)
    assert missing.value == "cannot be imported: ModuleNotFoundError: No module named 'torch'"
    (killed,) = ask(asks + "import os; os.kill(os.getpid(), 4)", tmp_path)
    assert killed.value == "cannot be imported: the interpreter was ended by SIGILL"
    (hung,) = ask(asks + "import time; time.sleep(60)", tmp_path, patience_s=0.3)
    assert hung.value == "cannot be imported: no answer in 0.3 s"
    assert "Traceback" not in missing.value + killed.value + hung.value


def test_what_was_found_before_the_end_stays(tmp_path: Path) -> None:
    lines = [{"asks": "torch"}, {"asks": "the GPUs"}, finding().to_dict(), {"asks": "communication"}]
    told = "\n".join(json.dumps(line) for line in lines)
    found = ask(f"print({told!r}); print('noise of a library'); raise SystemExit(3)", tmp_path)
    assert found[0] == finding()
    assert (found[1].name, found[1].state) == ("communication", State.BROKEN)
    assert "status 3" in found[1].value


def test_one_line_about_a_torch_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    why = Finding(
        section="versions", name="torch", value="not installed", state=State.BROKEN, remedy="pip install torch"
    )
    monkeypatch.setattr(software, "dependencies", lambda: [why])
    monkeypatch.setattr(examining, "ask_torch", lambda *_, **__: [asking._failure("torch", "no module")])
    report = examining.examine(tmp_path)
    assert [f for f in report.findings if f.name == "torch"] == [why]
    assert [f.name for f in report.findings if f.section == "transfers"][:2] == ["Rust module", "io_uring"]
    fine = Finding(section="versions", name="torch", value="2.15.0")
    monkeypatch.setattr(software, "dependencies", lambda: [fine])
    (only,) = [f for f in examining.examine(tmp_path).findings if f.name == "torch"]
    assert only.state is State.BROKEN


# -- what torch tells -------------------------------------------------------------------------------------------------


def test_gloo_of_this_machine_and_one_that_fails() -> None:
    assert torch_side.gloo().state is State.OK

    def fail() -> None:
        raise RuntimeError("no such interface\nat gloo/transport")

    failed = torch_side.gloo(fail)
    assert failed.state is State.BROKEN
    assert failed.value.endswith("each other: no such interface")
    assert "GLOO_SOCKET_IFNAME" in failed.remedy


def test_architectures_of_the_libraries_in_a_cache(tmp_path: Path) -> None:
    for key in ("abc-sm80.90", "def-sm100", "unfinished-sm70"):
        (tmp_path / f"zoo_kernels_cuda-{key}").mkdir()
    for key in ("abc-sm80.90", "def-sm100"):
        (tmp_path / f"zoo_kernels_cuda-{key}" / "zoo_kernels_cuda.so").touch()
    assert torch_side.built_architectures(tmp_path) == [80, 90, 100]
    assert torch_side.built_architectures(tmp_path / "nowhere") == []


def test_kernels_that_are_built_not_built_and_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from zoo.kernels import building, loading

    built = {f.name: f for f in torch_side._for_cpus(building, loading, needed=False)}
    if loading.native():
        assert "update_" in built["their names"].value
        assert all(name in built["native operations"].value for name in loading.isas())
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(building, "built_ahead", lambda: None)
    first = next(torch_side._for_cpus(building, loading, needed=False))
    assert (first.state, first.remedy) == (State.ABSENT, "zoo build")
    assert not any(tmp_path.iterdir()), "the doctor compiles nothing"
    monkeypatch.setenv("CXX", "no-such-compiler")
    (lacks,) = torch_side._for_cpus(building, loading, needed=False)
    assert (lacks.state, "no-such-compiler" in lacks.value) == (State.LIMITED, True)
    (needed,) = torch_side._for_cpus(building, loading, needed=True)
    assert needed.state is State.BROKEN


# -- the command ------------------------------------------------------------------------------------------------------


def zoo(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def test_the_command_and_its_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examining, "ask_torch", lambda *_, **__: [finding(State.LIMITED, "do this")])
    result = zoo("doctor", "--folder", tmp_path)
    assert result.exit_code == 0, result.output
    assert "-> do this" in result.output
    printed = json.loads(zoo("doctor", "--json").output)
    assert printed["healthy"] is True
    assert finding(State.LIMITED, "do this").to_dict() in printed["findings"]
    monkeypatch.setattr(examining, "ask_torch", lambda *_, **__: [finding(State.BROKEN)])
    result = zoo("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["healthy"] is False
    assert zoo("doctor", "--folder", tmp_path / "nowhere").exit_code == 2


@pytest.mark.slow
def test_a_new_interpreter_examines_this_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zoo.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    report = Report.from_dict(json.loads(done.stdout))
    assert {f.section for f in report.findings} >= {*SECTIONS} - {"environment"}
    assert done.returncode == (0 if report.healthy else 1)
    assert done.stderr == ""
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_it_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: undefined symbol')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "zoo.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 1
    assert "cannot be imported: OSError: libtorch_cpu.so: undefined symbol" in " ".join(done.stdout.split())
    assert "io_uring" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr

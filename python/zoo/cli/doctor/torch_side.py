"""What only torch can tell. It runs in a process of its own: ``python -m zoo.cli.doctor.torch_side FOLDER``.

Each line of its output is JSON: ``{"asks": ...}`` before a question, then its findings. Whoever reads it knows what was
asked last when the process dies or hangs.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from zoo.cli.doctor.report import Finding, State, human
from zoo.cli.doctor.transfers import transfers

_PATIENCE = timedelta(seconds=20)


def devices() -> Iterator[Finding]:
    """torch's build, and the GPUs that it sees."""
    import torch

    built = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}" if torch.version.hip else ""
    )
    value = f"{torch.__version__} for {built or 'CPUs alone'}, {Path(torch.__file__).parent}"
    yield Finding(section="versions", name="torch, imported", value=value, state=State.FACT)
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        value = f"{about.name}, compute capability {about.major}.{about.minor}, {human(about.total_memory)}"
        yield Finding(section="devices", name=f"cuda:{number}", value=value)
    if torch.cuda.device_count():
        return
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not nodes:
        yield Finding(section="devices", name="GPUs", value="none on this machine", state=State.FACT)
    elif not built:
        yield Finding(
            section="devices", name="GPUs", value=f"{len(nodes)} here, but this torch is built for CPUs alone",
            state=State.LIMITED, remedy="pip install --force-reinstall torch  # the build for CUDA",
        )  # fmt: skip
    else:
        yield Finding(
            section="devices", name="GPUs", value=f"{len(nodes)} here, but torch cannot use them: {_why_no_cuda()}",
            state=State.LIMITED, remedy="nvidia-smi  # says whether the driver works, and the newest CUDA that it runs",
        )  # fmt: skip


def _why_no_cuda() -> str:
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides them"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever torch says
        return first_line(error)
    return "no reason is given"


def first_line(error: BaseException) -> str:
    """Of what an exception says; the name of its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _finding(name: str, value: str, state: State = State.OK, remedy: str = "") -> Finding:
    return Finding(section="kernels", name=name, value=value, state=state, remedy=remedy)


def kernels() -> Iterator[Finding]:
    """The native operations: what is built, for which processors, and whether it loads. Nothing is compiled."""
    try:
        from zoo.kernels import building, loading
    except ImportError as error:
        yield _finding(
            "native operations", f"zoo.kernels cannot be imported: {first_line(error)}", State.BROKEN,
            "pip install ./cuda  # in a clone of zoo",
        )  # fmt: skip
        return
    try:
        mode = loading.mode()
    except ValueError as error:
        yield _finding("ZOO_KERNELS", str(error), State.BROKEN, "unset ZOO_KERNELS")
        return
    if mode == "reference":
        yield _finding(
            "native operations", "ZOO_KERNELS=reference: the references run", State.LIMITED, "unset ZOO_KERNELS"
        )
        return
    yield from _for_cpus(building, loading, needed=mode == "native")
    yield from _for_gpus(building)


def _for_cpus(building: Any, loading: Any, *, needed: bool) -> Iterator[Finding]:
    name, worst = "native operations", State.BROKEN if needed else State.LIMITED
    where = building.built_ahead()
    try:
        plan = None if where else building.cpu_plan()
    except building.BuildError as error:
        yield _finding(name, f"{first_line(error)} Slower references run", worst, "apt-get install g++ python3-dev")
        return
    if plan is not None:
        where = building.cache_dir() / "kernels" / plan.key / f"{plan.name}.so"
        if not where.exists():
            value = f"not compiled yet ({plan.files} files, about a minute, at their first use)"
            yield _finding(name, value, State.ABSENT, "zoo build")
            yield from _compiler(building)
            return
    try:
        loaded = loading.native()
        why = loading.why_not()
    except (building.BuildError, ValueError, OSError) as error:
        loaded, why = False, first_line(error)
    if not loaded:
        yield _finding(name, f"{where} does not load: {why}", worst, f"rm -r {Path(where).parent} && zoo build")
        return
    sets, held = loading.isas(), os.environ.get("ZOO_KERNELS_ISA")
    runs = f"runs {held or sets[-1]}{' by ZOO_KERNELS_ISA' if held else ''} of {', '.join(sets)}"
    yield _finding(name, f"{len(loading.operations())} on {platform.machine()}; this processor {runs}")
    yield _finding("their names", ", ".join(loading.operations()), State.FACT)
    yield _finding("their library", str(where), State.FACT)
    yield from _compiler(building)


def _compiler(building: Any) -> Iterator[Finding]:
    from zoo.kernels.building.cache import find_ninja
    from zoo.kernels.building.plan import compiler_version, find_compiler

    questions: tuple[tuple[str, Callable[[], str], str], ...] = (
        ("C++ compiler", lambda: compiler_version(find_compiler()), "apt-get install g++"),
        ("ninja", find_ninja, "pip install ninja"),
        ("headers of Python", lambda: _headers(building), "apt-get install python3-dev"),
    )
    for name, ask, remedy in questions:
        try:
            yield _finding(name, ask())
        except building.BuildError as error:
            yield _finding(name, first_line(error), State.ABSENT, remedy)


def _headers(building: Any) -> str:
    building.python_plan()  # a BuildError where they are missing
    return sysconfig.get_path("include")


def _for_gpus(building: Any) -> Iterator[Finding]:
    import torch

    wanted = sorted({10 * major + minor for major, minor in map(
        torch.cuda.get_device_capability, range(torch.cuda.device_count())
    )})  # fmt: skip
    built = built_architectures(building.cache_dir() / "kernels")
    value = f"built for compute capability {', '.join(map(str, built))} (in the cache)" if built else "none built"
    lacks = [number for number in wanted if number not in built]
    if lacks:
        remedy = f"zoo build --cuda-arch {','.join(map(str, wanted))}"
        yield _finding("CUDA kernels", f"{value}; compiled at their first use", State.ABSENT, remedy)
    else:
        yield _finding("CUDA kernels", value, State.OK if built else State.FACT)
    try:
        nvcc, _ = building.find_nvcc()
        yield _finding("nvcc", str(nvcc))
    except building.BuildError as error:
        state = State.LIMITED if lacks else State.ABSENT
        yield _finding("nvcc", first_line(error), state, "pip install 'zoo-kernels[nvcc]'  # make nvcc in a clone")


def built_architectures(folder: Path) -> list[int]:
    """Compute capabilities that finished libraries of this folder have code for."""
    found: set[int] = set()
    for library in folder.glob("zoo_kernels_cuda-*-sm*/zoo_kernels_cuda.so"):
        found |= {int(part) for part in library.parent.name.rpartition("-sm")[2].split(".") if part.isdecimal()}
    return sorted(found)


def communication() -> Iterator[Finding]:
    """Whether two ranks of this machine reach each other by gloo, and whether NCCL loads."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() > 0
    if not dist.is_available() or not dist.is_gloo_available():
        yield _talks("gloo", "this torch is built without it", State.BROKEN, "pip install --force-reinstall torch")
    else:
        yield gloo()
    if not (dist.is_available() and dist.is_nccl_available()):
        lost = State.LIMITED if gpus else State.FACT
        yield _talks(
            "nccl", "this torch is built without it", lost, "pip install --force-reinstall torch" if gpus else ""
        )
    elif gpus:
        yield _nccl()
    else:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield _talks("nccl", f"{version}; without a GPU nothing uses it", State.FACT)
    memfd = hasattr(os, "memfd_create")
    value = "ranks of this machine can share memory (memfd)" if memfd else "this system has no memfd_create"
    yield _talks("shared memory", value, State.OK if memfd else State.LIMITED)


def _talks(name: str, value: str, state: State = State.OK, remedy: str = "") -> Finding:
    return Finding(section="communication", name=name, value=value, state=state, remedy=remedy)


def gloo(exchange: Callable[[], None] | None = None) -> Finding:
    """Two ranks of this process sum a tensor over the interface that gloo would take."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        (exchange or _sum_of_two)()
    except Exception as error:  # whatever torch raises
        value = f"two ranks of this machine do not reach each other: {first_line(error)}"
        return _talks("gloo", value, State.BROKEN, "export GLOO_SOCKET_IFNAME=lo  # or a name that `ip link` shows")
    where = f"over {named}" if named else f"as {_address()}"
    return _talks("gloo", f"two ranks of this machine summed a tensor {where}")


def _address() -> str:
    try:
        return f"{socket.gethostname()} ({socket.gethostbyname(socket.gethostname())})"
    except OSError:
        return f"{socket.gethostname()}, a name without an address: gloo took the loopback interface"


def _sum_of_two() -> None:
    import torch
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            group: Any = dist.ProcessGroupGloo(store, rank, 2, _PATIENCE)
            given = torch.full((1024,), float(rank + 1))
            group.allreduce([given]).wait()
            if not bool((given == 3.0).all()):
                raise RuntimeError("the sum of two ranks came out wrong")
        except BaseException as error:  # of a thread: told by who waits for it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE.total_seconds())
        if thread.is_alive():
            raise RuntimeError(f"no answer in {2 * _PATIENCE.total_seconds():.0f} s")
    if failed:
        raise failed[0]


def _nccl() -> Finding:
    import torch
    import torch.distributed as dist

    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        given = torch.ones(1024, device="cuda")
        dist.all_reduce(given)
        torch.cuda.synchronize()
    except Exception as error:  # whatever torch raises
        return _talks(
            "nccl", f"{version} does not work here: {first_line(error)}", State.BROKEN,
            "NCCL_DEBUG=INFO zoo doctor  # shows what it tried",
        )  # fmt: skip
    return _talks("nccl", f"{version}; one rank on cuda:0 summed a tensor")


def main(folder: str) -> None:
    """Ask everything, in the order in which one thing is no use without the one before."""

    def tell(what: str, findings: Iterable[Finding]) -> None:
        _write({"asks": what})
        for finding in findings:
            _write(finding.to_dict())

    _write({"asks": "torch"})
    import torch

    tell("the GPUs", devices())
    tell("the native operations", kernels())
    tell("transfers", transfers(Path(folder), torch.cuda.is_available()))
    tell("communication", communication())
    _write({"asks": ""})
    sys.stdout.flush()
    os._exit(0)  # threads of gloo are still there, and have nothing to say


def _write(given: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(given) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

"""What ptxas says about kernels: kept beside the object, read, and refused where registers are spilled."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from scripts.kernels_check import SAID as LINES
from scripts.kernels_check import differences, headers_of, show_usage

from zoo.kernels.building import BuildError, Usage, build_cuda, readable, usage_of
from zoo.kernels.building.cuda import cuda_sources
from zoo.kernels.building.usage import parse

SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3zoo12_GLOBAL__N_111gate_kernelILb1EEEvPfi' for 'sm_80'
ptxas info    : Function properties for _ZN3zoo12_GLOBAL__N_111gate_kernelILb1EEEvPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2096 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 68.768 ms
ptxas info    : Compiling entry function '_ZN3zoo5otherEv' for 'sm_90a'
ptxas info    : Function properties for _ZN3zoo5otherEv
    16 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Function properties for _ZN3zoo6calledEv
    8 bytes stack frame, 0 bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
GATE, OTHER = "_ZN3zoo12_GLOBAL__N_111gate_kernelILb1EEEvPfi", "_ZN3zoo5otherEv"

FAKE_NVCC = """#!/bin/sh
[ "$1" = --version ] && {{ echo fake 1; exit 0; }}
cat >&2 "{said}"
while [ "$1" != -o ]; do shift; done
echo object > "$2"
"""


def test_kernels_are_read_with_what_they_call() -> None:
    assert parse(SAID.format(stores=12, loads=20)) == [
        Usage(kernel=GATE, architecture=80, registers=40, shared_bytes=2096),
        Usage(kernel=OTHER, architecture=90, registers=255, stack_bytes=24, spill_bytes=52),
    ]
    assert parse("") == []


def test_a_kernel_without_its_registers_is_an_error() -> None:
    text = SAID.format(stores=0, loads=0).replace("Used 40 registers", "Took 40 registers")
    with pytest.raises(BuildError, match=f"no line with the registers of {GATE}; it wrote:\nptxas info"):
        parse(text)


def test_names_are_short_and_keep_what_tells_kernels_apart() -> None:
    assert readable([GATE, OTHER]) == {GATE: "gate_kernel<true>", OTHER: "other"}
    assert readable([]) == {}


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "part"),
    [  # by the rules of the programming guide: 65,536 registers, 64 warps, 32 blocks; 164 KiB of shared memory on 8.0
        (32, 0, 256, 1.0), (33, 0, 256, 0.75), (40, 0, 256, 0.75), (64, 0, 256, 0.5), (255, 0, 256, 0.125),
        (32, 0, 32, 0.5), (16, 0, 1024, 1.0), (32, 32768, 256, 0.5), (32, 100_000, 128, 0.0625),
    ],
)  # fmt: skip
def test_occupancy(registers: int, shared: int, threads: int, part: float) -> None:
    usage = Usage(kernel="k", architecture=80, registers=registers, shared_bytes=shared)
    assert usage.occupancy(threads) == part


def test_spills_end_the_check_and_are_found_in_the_cache_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "said"
    (tmp_path / "nvcc").write_text(FAKE_NVCC.format(said=said))
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "cache"))
    said.write_text(SAID.format(stores=0, loads=0))
    show_usage([path for path, _ in build_cuda([80, 90])])
    assert "gate_kernel<true>" in capsys.readouterr().out
    said.write_text(SAID.format(stores=8, loads=4))
    made = build_cuda([80])
    assert all(new for _, new in made)
    assert [u.spill_bytes for u in usage_of(made[0][0])] == [0, 16]
    again = [path for path, new in build_cuda([80]) if not new]
    assert len(again) == len(made)
    with pytest.raises(SystemExit, match=r"registers are spilled to memory by other in \w+.cu for sm_90 \(16 bytes\)"):
        show_usage(again)


def test_a_kernel_that_takes_more_than_its_header_says_is_named() -> None:
    text = "//   gate_kernel      256 threads, <= 40 registers, >= 48 warps; 4 bytes an element\n"
    usages = [Usage(kernel=GATE, architecture=a, registers=40) for a in (80, 90)]
    found, names = {("gating", GATE): usages}, {GATE: "gate_kernel<true>", OTHER: "other"}
    assert differences(found, names, {"gating": text}) == []
    assert differences(found, names, {"gating": text.replace("40", "39")}) == [
        f"gate_kernel<true> in gating.cu takes 40 registers on sm_{a}, and 48 warps fit; "
        "its header says <= 39 and >= 48"
        for a in (80, 90)
    ]
    assert len(differences(found, names, {"gating": text.replace("48", "56")})) == 2
    assert differences({("gating", OTHER): usages}, names, {"gating": text}) == [
        "other in gating.cu is not in the header of its folder"
    ]


def test_every_kernel_is_in_the_header_of_its_folder() -> None:
    """Whether the numbers are right `make kernels-check` says, which compiles them."""
    headers = headers_of(cuda_sources())
    for source in cuda_sources():
        kernels = set(re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", source.read_text(encoding="utf-8")))
        assert kernels
        assert kernels <= {line[0] for line in LINES.findall(headers[source.stem])}, source

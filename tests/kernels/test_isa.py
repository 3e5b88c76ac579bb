"""``ZOO_KERNELS_ISA``: the kernels of a process held to one instruction set."""

from __future__ import annotations

import pytest
from tests.processes import run

from zoo.kernels import loading

pytestmark = pytest.mark.skipif(not loading.native(), reason="no native kernels here")


def test_the_environment_holds_the_kernels_to_an_instruction_set() -> None:
    program = "from zoo.kernels import loading; loading.native(); print(int(loading._library.zoo_isa()))"
    for number, isa in enumerate(loading.isas()):
        assert run(program, env={"ZOO_KERNELS_ISA": isa}, check=True).stdout == f"{number}\n"


def test_one_that_is_not_there_is_refused() -> None:
    found = run("from zoo.kernels import loading; loading.native()", env={"ZOO_KERNELS_ISA": "sse9"}, check=False)
    assert found.returncode == 1
    assert "ZOO_KERNELS_ISA=sse9; this processor runs portable" in found.stderr

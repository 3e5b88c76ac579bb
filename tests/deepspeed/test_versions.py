"""``deepspeed.git_version_info``: what programs and their tests ask before they choose."""

from __future__ import annotations

import re

import pytest
import torch
from zoo.deepspeed.git_version_info import (
    accelerator_name,
    compatible_ops,
    git_branch,
    git_hash,
    installed_ops,
    torch_info,
    version,
)

import zoo.deepspeed as deepspeed


def test_versions_are_two_numbers_as_programs_compare_them() -> None:
    assert set(torch_info) == {"version", "bf16_support", "cuda_version", "nccl_version", "hip_version"}
    assert torch.__version__.startswith(torch_info["version"] + ".")
    for key in ("version", "cuda_version", "nccl_version", "hip_version"):
        assert re.fullmatch(r"\d+\.\d+", torch_info[key]), key
    cuda, hip = torch.version.cuda, torch.version.hip
    assert torch_info["cuda_version"] == (".".join(cuda.split(".")[:2]) if cuda else "0.0")
    assert (torch_info["hip_version"] == "0.0") is (hip is None)
    assert torch_info["bf16_support"] is (torch.cuda.is_available() and torch.cuda.is_bf16_supported())
    assert (version, git_hash, git_branch) == (deepspeed.__version__, "unknown", "unknown")


def test_a_torch_without_gpus_has_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: pytest.fail("there is no NCCL to ask"))
    info = deepspeed.adapters.utilities.build_info.torch_info  # the module of the tables keeps what it has given once
    assert [info[f"{key}_version"] for key in ("cuda", "nccl", "hip")] == ["0.0"] * 3
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    info = deepspeed.adapters.utilities.build_info.torch_info
    assert (info["hip_version"], info["nccl_version"]) == ("6.4", "2.27")


def test_operations_and_the_accelerator() -> None:
    assert accelerator_name == deepspeed.get_accelerator().device_name().split(":")[0]
    assert compatible_ops == deepspeed.ops.__compatible_ops__
    assert compatible_ops["cpu_adam"]
    assert compatible_ops["async_io"]
    assert installed_ops.keys() == compatible_ops.keys()
    assert installed_ops["async_io"], "zoo's extension in Rust is compiled when it is installed"
    assert all(type(value) is bool for value in installed_ops.values())


def test_the_report_of_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.cli.doctor import examining
    from zoo.cli.doctor.report import Finding, State
    from zoo.deepspeed import env_report

    fast = Finding(section="devices", name="cuda:0", value="a fast one")
    absent = Finding(section="kernels", name="nvcc", value="none", state=State.ABSENT, remedy="buy a compiler")
    monkeypatch.setattr(examining, "ask_torch", lambda *_, **__: [fast, absent])
    assert [env_report.human_readable_size(size) for size in (0, 1023, 2048, 5 * 2**30, 2**52)] == [
        "0.00 B", "1023.00 B", "2.00 KB", "5.00 GB", "4096.00 TB",
    ]  # fmt: skip
    size, warnings = env_report.get_shm_size()
    assert size is None or (size.split()[1] in ("MB", "GB", "TB") and isinstance(warnings, list))
    monkeypatch.setattr("sys.argv", ["ds_report"])
    env_report.cli_main()
    said = capsys.readouterr().out
    assert all(f"\n{name} ." in said for name in ("cpu_adam", "async_io", "torch", "accelerator", "nvcc"))
    assert f"{torch.__version__}, " in said
    assert deepspeed.__version__ in said
    assert all(words in said for words in ("a fast one", "buy a compiler", "io_uring", "optional absent"))
    monkeypatch.setattr("sys.argv", ["ds_report", "--hide_operator_status", "--hide_errors_and_warnings"])
    env_report.cli_main()
    said = capsys.readouterr().out
    assert "a fast one" in said
    assert not [words for words in ("cpu_adam", "nvcc   ", "buy a compiler", "optional absent") if words in said]

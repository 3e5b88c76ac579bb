"""The documented methods, what is printed and written, and what cannot be."""

from __future__ import annotations

import inspect
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiling.test_counts import Calls, profiled
from torch import nn

from zoo.profiling import FlopsProfiler, Profile, flame_page, folded_stacks, get_model_profile, strings
from zoo.profiling.parameters import Parameters


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4)))


def test_signatures_are_the_documented_ones() -> None:
    shown = {name: p.default for name, p in inspect.signature(get_model_profile).parameters.items()}
    assert list(shown) == [
        "model", "input_shape", "args", "kwargs", "print_profile", "detailed", "module_depth", "top_modules",
        "warm_up", "as_string", "output_file", "ignore_modules", "mode",
    ]  # fmt: skip
    del shown["model"], shown["args"], shown["kwargs"]
    assert shown == {
        "input_shape": None, "print_profile": True, "detailed": True, "module_depth": -1, "top_modules": 1,
        "warm_up": 1, "as_string": True, "output_file": None, "ignore_modules": None, "mode": "forward",
    }  # fmt: skip
    of_print = inspect.signature(FlopsProfiler.print_model_profile).parameters
    assert [(name, p.default) for name, p in of_print.items()][1:] == [
        ("profile_step", 1), ("module_depth", -1), ("top_modules", 1), ("detailed", True), ("output_file", None),
    ]  # fmt: skip
    of_new = inspect.signature(FlopsProfiler).parameters
    shown = {name: p.default for name, p in of_new.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert shown == {"model": inspect.Parameter.empty, "ds_engine": None, "recompute_fwd_factor": 0.0}


def test_totals_as_numbers_and_strings() -> None:
    profiler = FlopsProfiler(small())
    profiler.start_profile()
    profiler.model(torch.randn(500, 8))
    profiler.stop_profile()
    assert (profiler.get_total_flops(), profiler.get_total_flops(as_string=True)) == (192_000, "192 K")
    assert (profiler.get_total_macs(), profiler.get_total_macs(as_string=True)) == (96_000, "96 KMACs")
    assert (profiler.get_total_params(), profiler.get_total_params(as_string=True)) == (212, "212")
    assert 0 < profiler.get_total_duration() < 10
    assert re.fullmatch(r"[\d.e-]+ [mu]?s", profiler.get_total_duration(as_string=True))
    profiler.end_profile()
    assert profiler.get_total_flops() == 192_000, "still there"
    assert (profiler.flops, profiler.macs, profiler.params) == (192_000, 96_000, 212)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (7, "7 "), (999, "999 "), (1000, "1 K"), (1_234_567, "1.23 M"), (2e9, "2 G"), (3.5e12, "3.5 T"),
     (0.25, "250 m"), (2e-6, "2 u"), (1e-9, "0 u")],
)  # fmt: skip
def test_numbers_as_strings(number: float, text: str) -> None:
    assert strings.number_to_string(number) == text
    assert strings.macs_to_string(number) == text + "MACs"
    assert strings.flops_to_string(number) == text + "FLOPS"
    assert strings.duration_to_string(number) == text + "s"
    assert strings.bytes_to_string(number) == text + "B"
    assert strings.params_to_string(number) == text.replace("G", "B").strip()


def test_units_and_digits_can_be_asked_for() -> None:
    assert strings.number_to_string(1_234_567, units="K", precision=1) == "1234.6 K"
    assert strings.params_to_string(1_234_567_890, units="B") == "1.23 B"
    for number, unit in ((strings.number_to_string, "k"), (strings.bytes_to_string, "GB")):
        with pytest.raises(ValueError, match=f"units = '{unit}'; allowed are 'T', 'G'"):
            number(1e9, units=unit)


def test_one_call_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = small().train()
    net[1].eval()
    assert get_model_profile(net, (500, 8), print_profile=False) == ("192 K", "96 KMACs", "212")
    assert capsys.readouterr().out == ""
    assert [m.training for m in net] == [True, False, True], "modes are put back"
    assert get_model_profile(net, args=None, kwargs={"input": torch.ones(500, 8)}, as_string=False) == (
        192_000, 96_000, 212,
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "Sequential(" in shown
    assert "96 KMACs = 100 % of MACs" in shown
    place = tmp_path / "new" / "profile.txt"
    get_model_profile(net, (500, 8), output_file=str(place), detailed=False)
    assert capsys.readouterr().out == ""
    assert "192 K" in place.read_text()
    assert "in_features" not in place.read_text()


def test_calls_to_warm_up_to_count_and_for_the_clock() -> None:
    called: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        called.append(bool(torch.utils._python_dispatch._get_current_dispatch_mode()))
        return x @ x

    get_model_profile(Calls(function), (2, 2), print_profile=False, warm_up=3)
    assert called == [False, False, False, True, False], "the last one is timed with nothing in between"


def test_seconds_are_those_of_the_clock_and_not_of_counting() -> None:
    slept = []

    class Sleeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun = time.perf_counter()
            time.sleep(0.02)
            slept.append(time.perf_counter() - begun)
            return x

    class Many(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2000):
                x = x + 1
            return x

    net = nn.Sequential(Sleeps(), Sleeps(), Many())
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    begun = time.perf_counter()
    net(torch.ones(1))
    whole = time.perf_counter() - begun
    profiler.end_profile()
    seconds = [child.seconds or 0.0 for child in profiler.profile.model.children]
    for told, real in zip(seconds, slept, strict=False):
        assert told >= real
    duration, counting = profiler.get_total_duration(), profiler.seconds_of_counting
    assert duration >= sum(seconds)
    assert counting > 2000 * 1e-6
    assert duration <= whole - 0.9 * counting, "what counting took is in no seconds"


def test_generation_is_a_mode() -> None:
    class Generates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x)

        def generate(self, x: torch.Tensor, tokens: int) -> Any:
            for _ in range(tokens):
                x = self(x)
            return x

    def ask(**how: Any) -> Any:
        return get_model_profile(
            Generates(), args=[torch.ones(2, 4)], print_profile=False, as_string=False, **how
        )  # fmt: skip

    assert ask()[1] == 32
    assert ask(mode="generate", kwargs={"tokens": 5})[1] == 5 * 32


def test_a_model_on_meta_has_no_seconds() -> None:
    net = small().to("meta")
    found = get_model_profile(net, (500, 8), print_profile=False, as_string=False)
    assert found == (192_000, 96_000, 212)
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    net(torch.ones(500, 8, device="meta"))
    profiler.end_profile()
    assert profiler.get_total_duration() is None
    assert profiler.get_total_duration(as_string=True) == "not measured"
    profiler.print_model_profile()


def test_ignored_classes_are_their_parents() -> None:
    net = small()
    profiler = FlopsProfiler(net)
    profiler.start_profile(ignore_list=[nn.Linear])
    net(torch.randn(5, 8))
    profiler.end_profile()
    assert profiler.get_total_macs() == 5 * (128 + 64)
    assert [profiler.profile.module(path).forward.macs for path in ("0", "2", "2.0")] == [0, 5 * 64, 0]
    assert profiler.get_total_params() == 212


def test_the_job_is_in_the_heading(capsys: pytest.CaptureFixture[str]) -> None:
    engine = SimpleNamespace(
        world_size=8, dp_world_size=None, seq_dp_world_size=4, mp_world_size=2,
        train_micro_batch_size_per_gpu=lambda: 3,
    )  # fmt: skip
    profiler = FlopsProfiler(small(), engine)
    profiler.start_profile()
    profiler.model(torch.randn(5, 8))
    profiler.print_model_profile(profile_step=7, detailed=False)
    profiler.end_profile()
    shown = capsys.readouterr().out
    for name, value in {
        "world size": "8", "data parallel size": "4", "model parallel size": "2", "micro-batch of a rank": "3",
        "parameters of the model = parameters * model parallel size": "424",
    }.items():  # fmt: skip
        assert re.search(rf"^{re.escape(name)}:\s+{value}$", shown, re.MULTILINE), name
    assert "step 7" in shown


def test_the_largest_modules(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = FlopsProfiler(small())
    profiler.start_profile()
    profiler.model(torch.randn(500, 8))
    profiler.end_profile()
    profiler.print_model_aggregated_profile(module_depth=1, top_modules=2)
    shown = capsys.readouterr().out
    assert "depth 1:" in shown
    assert "depth 2:" not in shown
    assert "    MACs       Linear 64 KMACs, Sequential 32 KMACs" in shown
    profiler.print_model_aggregated_profile()
    assert "depth 2:" in capsys.readouterr().out


def test_what_was_not_counted_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = FlopsProfiler(Calls(torch.linalg.matrix_exp))
    profiler.start_profile()
    profiler.model(torch.randn(3, 3))
    profiler.print_model_profile()
    profiler.end_profile()
    assert "Not counted, because they have no formula (calls): aten::linalg_matrix_exp (1)" in capsys.readouterr().out


def trained() -> Profile:
    return profiled(small(), torch.randn(500, 8), backward=True)


def test_utilisation_tells_recomputation_apart() -> None:
    found = trained()
    assert found.model_flops == 192_000 + 2 * 500 * (128 + 2 * 64)
    use = found.utilisation(1e9, seconds=0.01)
    assert use.mfu == use.hfu == found.model_flops / 1e7
    assert not use.estimated
    assert found.training_s is not None
    assert found.training_s > 0
    assert found.utilisation(1e12).mfu == pytest.approx(found.model_flops / 1e12 / found.training_s)
    profiler = FlopsProfiler(small(), recompute_fwd_factor=1.0)
    profiler.start_profile()
    profiler.model(torch.randn(500, 8))
    profiler.end_profile()
    use = profiler.profile.utilisation(1e9, seconds=0.01)
    assert (use.mfu, use.hfu, use.estimated) == (3 * 192_000 / 1e7, 4 * 192_000 / 1e7, True)
    with pytest.raises(ValueError, match="without a measured backward"):
        profiler.profile.utilisation(1e9)
    with pytest.raises(ValueError, match="must be positive"):
        profiler.profile.utilisation(0, seconds=1)


def test_json_has_the_tree(tmp_path: Path) -> None:
    found = trained()
    text = found.to_json(tmp_path / "profiles" / "one.json")
    kept = json.loads((tmp_path / "profiles" / "one.json").read_text())
    assert kept == json.loads(text) == found.to_dict()
    assert kept["model"]["forward"]["flops"] == 192_000
    inner = kept["model"]["children"][2]["children"][0]
    assert (inner["path"], inner["class"], inner["backward"]["macs"]) == ("2.0", "Linear", 500 * 2 * 64)
    assert kept["operators"]["aten::addmm"]["calls"] == 2
    assert kept["not_counted"] == {}


@given(st.sampled_from(["flops", "elementwise", "bytes"]))
def test_stacks_sum_up_to_the_whole(measure: Any) -> None:
    found = trained()
    lines = folded_stacks(found, measure).splitlines()
    total = sum(int(line.rpartition(" ")[2]) for line in lines)
    passes = (found.model.forward, found.model.backward, found.model.recomputation)
    of = {"flops": "flops", "elementwise": "elementwise", "bytes": "moved_bytes"}[measure]
    assert all(line.startswith("Sequential") for line in lines)
    assert 0 < total <= sum(getattr(work, of) for work in passes)
    if measure == "flops":
        assert total == found.model_flops
        assert any(line.startswith("Sequential;2;0 ") for line in lines)


def test_the_flame_page_needs_nothing_else(tmp_path: Path) -> None:
    page = flame_page(trained(), tmp_path / "flame.html")
    assert (tmp_path / "flame.html").read_text() == page
    assert "http" not in page
    assert "src=" not in page
    bars = re.findall(r'data-whole="(\d+)"><b title="(\w+):', page)
    assert [name for _, name in bars] == ["Sequential", "0", "2", "0"]
    widths = [int(whole) for whole, _ in bars]
    assert widths[0] == widths[1] + widths[2] == trained().model_flops
    assert widths[2] == widths[3]
    with pytest.raises(ValueError, match="measure='time'"):
        flame_page(trained(), measure="time")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: FlopsProfiler(3), "takes a torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: FlopsProfiler(small(), recompute_fwd_factor=-1), "recompute_fwd_factor=-1"),
        (lambda: FlopsProfiler(small()).get_total_flops(), "call start_profile"),
        (lambda: FlopsProfiler(small()).print_model_profile(), "call start_profile"),
        (lambda: FlopsProfiler(small()).start_profile([nn.Linear(2, 2)]), "classes of modules"),  # type: ignore[list-item]
        (lambda: get_model_profile(small()), "needs input_shape, or args and kwargs"),
        (lambda: get_model_profile(small(), 5), "it is a tuple of sizes"),  # type: ignore[arg-type]
        (lambda: get_model_profile(small(), (2.5, 8)), "it is a tuple of sizes"),  # type: ignore[arg-type]
        (lambda: get_model_profile(small(), (5, 8), args=[torch.ones(5, 8)]), "input_shape and args"),
        (lambda: get_model_profile(small(), args=torch.ones(5, 8)), "args of Tensor"),  # type: ignore[arg-type]
        (lambda: get_model_profile(small(), kwargs=[1]), "kwargs of list"),  # type: ignore[arg-type]
        (lambda: FlopsProfiler(small()).start_profile(nn.Linear), "is a list of classes"),  # type: ignore[arg-type]
        (lambda: get_model_profile(small(), (5, 8), mode="train"), "allowed are 'forward' and 'generate'"),
        (lambda: get_model_profile(small(), (5, 8), mode="generate"), "no method generate"),
    ],
)
def test_what_cannot_be_is_said(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_a_failing_forward_leaves_nothing_on() -> None:
    net = small()
    with pytest.raises(RuntimeError, match="shapes"):
        get_model_profile(net, (5, 7), print_profile=False)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert all(module.training for module in net.modules())


def test_parameters_are_counted_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    found = profiled(nn.Sequential(first, second), torch.randn(1, 4)).model
    assert found.parameters == Parameters(numel=16, kept=16, active=16)
    assert [child.parameters.numel for child in found.children] == [16, 16]
    assert found.forward.macs == 32

"""zero.Init: a model partitioned while it is built is, bit for bit, the model that an ordinary construction gives."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests import processes
from tests.laws.cases import Case, Model, cases, loss_of, optimizer_of
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.io import AioConfig
from zoo.shard.memory import CAN_REFUSE_STORAGE
from zoo.zero import Init, PartitionedAccessError, Stage3Optimizer, ZeroConfig, ZeroOptimizer


def whole(model: nn.Module, stage: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    options = {"param_persistence_threshold": 0, "reduce_bucket_size": 50, **options}
    return ZeroOptimizer(model, stage=stage, lr=0.1, **options).consolidated_parameters()


def same(found: dict[str, torch.Tensor], expected: nn.Module) -> None:
    named = dict(expected.named_parameters())
    assert list(found) == list(named)
    for name, value in found.items():
        assert torch.equal(value, named[name].detach()), name


def bytes_here(parameters: Iterable[nn.Parameter]) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}
    return sum(storages.values())


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


class Shelves:
    """A swapper that keeps what it is given in a dict."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def swap_out(self, key: int, values: torch.Tensor) -> None:
        self.kept[key] = values.clone()

    def swap_in(self, key: int, out: torch.Tensor) -> None:
        out.copy_(self.kept[key])

    def drop(self, key: int) -> None:
        del self.kept[key]


@pytest.mark.dear
@given(
    case=cases(max_world=5), stage=st.integers(0, 3), where=st.sampled_from([None, "cpu", "nvme"]),
    low=st.booleans(), meta=st.booleans(), later=st.booleans(),
)  # fmt: skip
@example(
    case=Case(world=3, tied=True, shared_block=True, odd_shapes=True), stage=3, where="nvme", low=True, meta=False,
    later=False,
)  # fmt: skip
@example(case=Case(world=3, tied=True), stage=3, where=None, low=False, meta=True, later=True)
def test_training_after_init_computes_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, case: Case, stage: int, where: str | None, low: bool, meta: bool,
    later: bool,
) -> None:  # fmt: skip
    if meta:
        case = Case(**{**case.__dict__, "odd_shapes": False})
    dtype = torch.bfloat16 if low else None
    folder = tmp_path_factory.mktemp("nvme")
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}

    def train(rank: int, init: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
        # Every rank draws other values: those of rank 0 must count.
        torch.manual_seed(case.seed + rank)
        if not init:
            model: nn.Module = Model(case).to(dtype or torch.float32)
        else:
            options: dict[str, Any] = {"dtype": dtype, "remote_device": where}
            if where == "nvme":
                options["config"] = {"zero_optimization": zero}
            if later:
                with torch.device("meta" if meta else "cpu"):
                    model = Model(case)
                if meta:
                    torch.manual_seed(case.seed + rank)
                Init(model, **options)
            else:
                with torch.device("meta" if meta else "cpu"), Init(**options):
                    model = Model(case)
            assert bytes_here(model.parameters()) == 0
        cls, arguments = optimizer_of(case)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=cls, reduce_bucket_size=case.bucket_size,
            param_persistence_threshold=case.threshold, **arguments,
        )  # fmt: skip
        losses = []
        for step in range(2):
            loss = loss_of(model, case, rank, step, 0)
            losses.append(float(loss.detach()))
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters(), losses

    expected = sim.run(case.world, lambda rank: train(rank, False))
    found = sim.run(case.world, lambda rank: train(rank, True))
    for (values, losses), (other, other_losses) in zip(found, expected, strict=True):
        assert losses == other_losses
        for name, value in values.items():
            assert torch.equal(value, other[name]), name
    assert list(folder.iterdir()) == []


class Custom(nn.Module):
    """A parent that initialises its children after they were built."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(5, 2)
        getattr(self, how)()

    def init_function(self) -> None:
        nn.init.normal_(self.a.weight, std=0.3)
        nn.init.zeros_(self.b.bias)

    def many_operations(self) -> None:
        nn.init.trunc_normal_(self.a.weight)
        nn.init.orthogonal_(self.b.weight)

    def data(self) -> None:
        self.a.weight.data.zero_()
        self.b.weight.data[0].fill_(2.0)
        self.a.bias.data = torch.arange(5.0)

    def no_grad(self) -> None:
        with torch.no_grad():
            self.a.weight.copy_(torch.arange(15.0).view(5, 3))
            self.b.weight[1] += 1.0
            self.b.weight.mul_(self.a.weight.sum())
            self.a.bias.set_data = None  # attributes are free

    def applied(self) -> None:
        def fn(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(0.0, 0.02)
                nn.init.ones_(module.bias)

        self.apply(fn)

    def applied_from_above(self) -> None:
        def fn(module: nn.Module) -> None:
            if isinstance(module, Custom):
                module.a.weight.data.fill_(3.0)

        self.apply(fn)

    def detached_numpy(self) -> None:
        self.a.weight.detach().numpy()[:] = 4.0

    def view_kept_for_a_while(self) -> None:
        view = self.a.weight.data
        self.c = nn.Linear(2, 2)
        nn.init.ones_(self.b.weight)
        view.fill_(7.0)

    def copied_layer(self) -> None:
        self.layers = nn.ModuleList(copy.deepcopy(self.a) for _ in range(2))
        nn.init.ones_(self.layers[1].bias)

    def replaced(self) -> None:
        self.a.weight = nn.Parameter(torch.full((5, 3), 9.0))
        self.extra = nn.Parameter(self.b.weight.detach().clone() * 2)

    def weight_norm(self) -> None:
        torch.nn.utils.parametrizations.weight_norm(self.a)

    def old_weight_norm(self) -> None:
        torch.nn.utils.weight_norm(self.a)

    def converted(self) -> None:
        self.b.double()
        self.a.weight.data = self.a.weight.data.half()

    def tied(self) -> None:
        self.c = nn.Linear(3, 5)
        self.c.weight = self.a.weight
        nn.init.constant_(self.c.weight, 6.0)

    def ready_made(self) -> None:
        self.attention = nn.MultiheadAttention(4, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
        self.rnn = nn.LSTM(3, 4, 2)
        self.norm = nn.BatchNorm1d(3)


HOWS = [name for name, found in vars(Custom).items() if callable(found) and not name.startswith("__")]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("override", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_initialisers_of_parents_take_effect_on_every_rank(how: str, override: bool) -> None:
    config = ZeroConfig(override_module_apply=override)
    options = {"units": [Custom]} if "weight_norm" in how else {}

    def fn(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(5 * rank)
        with Init(config=config):
            model = Custom(how)
        assert how in ("weight_norm",) or bytes_here(model.parameters()) == 0
        found: dict[str, torch.Tensor] = {}
        if how == "converted":
            options["optimizer"] = torch.optim.SGD
        return {**found, **whole(model, **options)}

    expected = seeded(lambda: Custom(how))
    for found in sim.run(3, fn):
        same(found, expected)


def test_the_report_names_initialisers_and_parameters() -> None:
    class Parent(Custom):
        def __init__(self) -> None:
            super().__init__("init_function")
            self.a.weight.norm()

    def fn(rank: int) -> Any:
        init = Init()
        with init:
            model = nn.Sequential(Parent())
        report = init.report()
        del model
        return report

    for report in sim.run(2, fn):
        touches = {(t.parameter, t.function, t.wrote) for t in report.touches}
        assert ("0.a.weight", "normal_", True) in touches
        assert ("0.a.weight", "norm", False) in touches
        assert (report.num_parameters, report.numel, report.largest_numel) == (4, 32, 20)
        assert "0.a.weight, 0.b.bias" in str(report)


def test_what_cannot_be_followed_is_an_error_with_a_name() -> None:
    class TiesData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight.data = self.embed.weight.data

    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4)
            self.a.weight.data = torch.zeros(2, 3)

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4)
            self.seen = [self.a.weight.data]

    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4)
            with torch.no_grad():
                self.a.weight.set_(torch.zeros(4, 3))

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4)
            self.again = nn.Parameter(self.a.weight)

    for build, words in [
        (Moves, r"Linear\.weight.*partitioned it" if CAN_REFUSE_STORAGE else r"a\.weight.*other memory"),
        (TiesData, r"Linear\.weight.*Embedding\.weight.*Tie the"),
        (Reshapes, r"Linear\.weight.*\(2, 3\).*\(4, 3\)"),
        (Keeps, r"a\.weight.*lost"),
        (Twins, r"a\.weight' and 'again.*share memory"),
    ]:
        with pytest.raises(RuntimeError, match=words), Init():
            kept = build()  # noqa: F841


def test_touching_after_the_context_is_refused_by_name() -> None:
    with Init():
        model = nn.Sequential(nn.Linear(3, 4))
    assert model[0].weight.shape == (4, 3)
    assert model[0].weight.grad is None
    for touch in (
        lambda p: p.sum(),
        lambda p: p.data + 1,
        lambda p: p.detach().sum(),
        lambda p: p.numpy(),
        lambda p: p[0] + 1,
    ):
        with pytest.raises(PartitionedAccessError, match=r"0\.weight.*GatheredParameters"):
            touch(model[0].weight)
    with pytest.raises(PartitionedAccessError, match=r"0\.weight"):
        model(torch.ones(1, 3))


def test_a_partitioned_model_can_be_converted_and_moved(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}

    def build() -> nn.Module:
        layer = nn.Linear(3, 5)
        tied = nn.Linear(3, 5)
        tied.weight = layer.weight
        return nn.Sequential(layer, tied)

    def fn(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(4)
        with Init(config=config if rank == 0 else None):
            model = build().to("cpu")
            model[0].bfloat16()
        model.to(dtype=torch.bfloat16, device="cpu").to(torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model[0].weight is model[1].weight
        return whole(model)

    for found in sim.run(3, fn):
        same(found, seeded(build, 4).to(torch.bfloat16))


def test_ranks_that_build_different_models_are_named() -> None:
    def fn(rank: int) -> None:
        with Init():
            nn.Linear(3, 3 + rank // 2)

    def initialise(rank: int) -> None:
        with Init():
            layer = nn.Linear(3, 3)
            if rank == 1:
                nn.init.ones_(layer.weight)
            else:
                nn.init.ones_(layer.bias)

    for wrong, world in ((fn, 3), (initialise, 2)):
        with pytest.raises(sim.RankError) as caught:
            sim.run(world, wrong)
        assert isinstance(caught.value.__cause__, CollectiveMismatchError)
        assert "rank" in str(caught.value)


def test_everything_is_put_back() -> None:
    before = (nn.Linear.__init__, nn.Module.apply, nn.Module.__dict__.get("__init_subclass__"))
    with pytest.raises(ValueError, match="invalid literal"), Init():
        nn.Sequential(nn.Linear(2, 2), int("could not"))
    with Init(), Init(dtype=torch.bfloat16):

        class Late(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(2))

        assert Late().w.dtype == torch.bfloat16
        with pytest.raises(ZeroDivisionError):
            type("Bad", (nn.Module,), {"__init__": lambda self: [][1 // 0]})()
    assert (nn.Linear.__init__, nn.Module.apply, nn.Module.__dict__.get("__init_subclass__")) == before
    assert Late().w.dtype == torch.float32
    with Init(enabled=False):
        assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_nested_contexts_partition_with_the_inner_ones_options() -> None:
    with Init():
        outer = nn.Linear(2, 2)
        with Init(dtype=torch.bfloat16):
            inner = nn.Linear(2, 2)
        nn.init.ones_(inner.weight)
        after = nn.Linear(2, 2)
    assert [m.weight.dtype for m in (outer, inner, after)] == [torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"remote_device": "tape"}, ValueError, "remote_device='tape'"),
        ({"remote_device": "nvme"}, ValueError, "nvme_path"),
        ({"param_swapper": 3}, ValueError, r"param_swapper=3.*swap_out\(\), swap_in\(\), drop\(\)"),
        ({"param_swapper": Shelves(), "remote_device": "cpu"}, ValueError, "a swapper is for"),
        ({"param_swapper": Shelves(), "aio": AioConfig()}, ValueError, "both param_swapper and aio"),
        ({"param_swapper": AioConfig(), "remote_device": "nvme"}, ValueError, "nvme_path"),
        ({"dtype": torch.int8}, ValueError, "int8"),
        ({"mpu": object()}, ValueError, "get_data_parallel_group"),
        ({"data_parallel_group": [0, 1]}, ValueError, r"data_parallel_group=\[0, 1\] is a list.*new_group"),
        ({"zero_param_parallel_group": [0]}, ValueError, r"zero_param_parallel_group=\[0\] is a list.*new_group"),
        ({"device": "tape"}, ValueError, "device='tape', which is no device"),
        ({"materialise": 3}, ValueError, "materialise=3; it takes a function"),
        ({"config": {}, "config_dict_or_path": {}}, ValueError, "two names"),
        ({"config": {"zero_optimization": {"stage": 7}}}, ValueError, "stage"),
    ],
)
def test_bad_options_say_what_is_wrong(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Init(**options)


@pytest.mark.filterwarnings("error")
def test_a_document_with_sizes_to_be_chosen_is_enough(tmp_path: Path) -> None:
    # Hugging Face builds the model before it knows its sizes, and writes them into the document afterwards.
    document = {
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "offload_param": {"device": "cpu", "pin_memory": False},
        },
        "bf16": {"enabled": True}, "fp16": {"enabled": "auto"}, "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True, "flops_profiler": {"enabled": True},
    }  # fmt: skip
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(document))
    for config in (document, path, str(path)):
        with Init(config_dict_or_path=config):
            model = nn.Linear(4, 4)
        assert model.weight.dtype == torch.bfloat16
        optimizer = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=1, reduce_bucket_size=7)
        assert (optimizer.config.param_persistence_threshold, optimizer.config.bucket_size) == (1, 7)
    with pytest.raises(
        ValueError, match=r"ds_config.json: zero_optimization.stage: given 7 \(int\); allowed: less than"
    ):
        Init(config=_with(tmp_path, {"zero_optimization": {"stage": 7}}))


def _with(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(document))
    return path


def test_the_configuration_gives_what_is_not_given() -> None:
    with Init(config_dict_or_path={"bf16": {"enabled": True}}):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    with Init(config={"fp16": {"enabled": True}}, dtype=torch.float64):
        assert nn.Linear(2, 2).weight.dtype == torch.float64


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("angles", torch.arange(3.0))


def test_the_meta_device_needs_an_initialiser() -> None:
    with pytest.raises(ValueError, match=r"Owner holds 'scale', 'angles'.*reset_parameters"):  # noqa: SIM117
        with torch.device("meta"), Init():
            Owner()

    def materialise(module: nn.Module) -> None:
        if isinstance(module, Owner):
            with torch.no_grad():
                module.scale.fill_(2.0)
        else:
            module.reset_parameters()

    with pytest.raises(ValueError, match="left 'angles' undefined"):  # noqa: SIM117
        with torch.device("meta"), Init(materialise=materialise):
            Owner()

    def complete(module: nn.Module) -> None:
        materialise(module)
        if isinstance(module, Owner):
            module.angles.copy_(torch.arange(3.0))

    with torch.device("meta"), Init(materialise=complete):
        model = nn.Sequential(Owner(), nn.Linear(3, 3))
    assert model[0].angles.tolist() == [0.0, 1.0, 2.0]
    assert whole(model)["0.scale"].tolist() == [2.0, 2.0, 2.0]


def test_ready_made_modules_can_be_built_on_the_meta_device() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.MultiheadAttention(4, 2), nn.LSTM(3, 4), nn.BatchNorm1d(3), nn.GroupNorm(2, 4))

    def fn(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(3 + rank)
        with torch.device("meta"), Init():
            model = build()
        assert model[2].running_var.tolist() == [1.0, 1.0, 1.0]
        return whole(model)

    for found in sim.run(2, fn):
        same(found, seeded(build, 3))


LARGER_THAN_MEMORY = """
import sys, torch
from torch import nn
from zoo.zero import Init

def build():
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(48)])  # 384 MiB

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * int(status["VmHWM"].split()[0])

torch.set_num_threads(1)
config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": sys.argv[2]}}}
Init(nn.Linear(8, 8), config=config)  # everything is imported
before = peak()
if sys.argv[1] == "plain":
    model = build()
else:
    init = Init(config=config)
    with torch.device(sys.argv[1]), init:
        model = build()
    assert init.report().numel == 48 * 2 * 1024 * 1025
print(peak() - before)
"""


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("how", ["cpu", "meta"])
def test_building_on_nvme_takes_a_fraction_of_the_models_memory(tmp_path: Path, how: str) -> None:
    def run(how: str) -> int:
        return int(processes.run(LARGER_THAN_MEMORY, how, tmp_path, check=True).stdout)

    size = 48 * 2 * 1024 * 1025 * 4
    assert run("plain") > 0.95 * size
    # 64 MiB are the first slab of the buffers that files are written from, the rest is a few modules of 4 MiB each.
    assert run(how) < size / 4


def test_a_rank_holds_one_module_and_its_part() -> None:
    peaks: dict[int, int] = {}

    class Watched(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen[rank_of()] += [self.weight, self.bias]
            peaks[rank_of()] = max(peaks.get(rank_of(), 0), bytes_here(seen[rank_of()]))

    seen: dict[int, list[nn.Parameter]] = {0: [], 1: []}

    def rank_of() -> int:
        return torch.distributed.get_rank()

    def fn(rank: int) -> None:
        with Init():
            nn.Sequential(*[Watched(8, 8) for _ in range(10)])

    sim.run(2, fn)
    assert peaks == {0: (64 + 8) * 4, 1: (64 + 8) * 4}


def test_the_optimizer_takes_a_model_of_init_once() -> None:
    with Init():
        model = nn.Sequential(nn.Linear(4, 4))
    optimizer = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0)
    with pytest.raises(ValueError, match="ZeroParameter"):
        Stage3Optimizer(model, lr=0.1)
    optimizer.close()
    assert type(model[0].weight) is nn.Parameter
    assert model(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dtype": "fp16"}, r"dtype='fp16'; it takes a torch\.dtype"),
        ({"dtype": 5}, r"dtype=5; it takes a torch\.dtype"),
        ({"dtype": torch.int8}, r"dtype=torch\.int8; it must be a floating-point one"),
        ({"module": 5}, r"module=5 \(int\); it takes an nn\.Module"),
        ({"module": nn.Linear}, r"module=.*; it takes an nn\.Module"),
        ({"remote_device": ["cpu"]}, r"remote_device=\['cpu'\]; allowed are"),
    ],
)
def test_arguments_that_are_none(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"Init got {told}"):
        Init(**given)

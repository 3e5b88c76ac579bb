"""Models of Hugging Face with grouped experts and expert parallelism compute what they computed before."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.models import (
    VOCABULARY,
    DeepseekV3Experts,
    OneByOne,
    Plain,
    SelfSaying,
    Small,
    fill,
    needs_peft,
    needs_transformers,
    of_transformers,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.config import load
from zoo.engine import initialize
from zoo.moe import ExpertsPreset, commit_balance, parallelise, use_mesh, whole_state_dict
from zoo.moe.huggingface.experts import ParallelExperts
from zoo.zero import ZeroOptimizer

RATE = 0.05
KINDS: dict[str, type[OneByOne]] = {"preset": DeepseekV3Experts, "said": SelfSaying, "described": Plain}
DESCRIBED = ExpertsPreset(experts="Plain", up="w_in", down="w_out", gated=False, activation="phi", join=None)


@dataclass(frozen=True)
class Case:
    data: int = 1
    expert: int = 2
    tensor: int = 1
    experts: int = 4
    k: int = 2
    kind: str = "preset"
    chunks: int = 1
    stage: int = 3
    clip_norm: float = 0.0
    bias_speed: float = 0.0
    tokens: tuple[int, ...] = (5, 3)
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data, expert, tensor = draw(st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 1, 1), (1, 2, 2)]))
    experts = draw(st.sampled_from([4, 8]))
    return Case(
        data=data, expert=expert, tensor=tensor, experts=experts, k=draw(st.integers(1, experts)),
        kind=draw(st.sampled_from(sorted(KINDS))),
        chunks=draw(st.sampled_from([c for c in (1, 2) if not experts // expert % c])),
        stage=draw(st.integers(0, 3)), clip_norm=draw(st.sampled_from([0.0, 0.01])),
        bias_speed=draw(st.sampled_from([0.0, 0.1])),
        tokens=tuple(draw(st.sampled_from([0, 1, 3, 5])) for _ in range(data * expert)),
        seed=draw(st.integers(0, 10**6)),
    )  # fmt: skip


def ids_of(case: Case, replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + 10 * step + replica)
    return torch.randint(VOCABULARY, (case.tokens[replica],), generator=generator)


def parallel(model: nn.Module, case: Case, mesh: Any) -> nn.Module:
    return parallelise(
        model, ep_size=case.expert, mesh=mesh, presets=(DESCRIBED,), chunks=case.chunks, bias_speed=case.bias_speed
    )


def reference(case: Case, steps: int) -> dict[str, torch.Tensor]:
    """One process, one expert after the other; the micro-batch of each rank by itself."""
    model = Small(KINDS[case.kind], case.experts, case.k)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    num = case.data * case.expert
    for step in range(steps):
        chosen: dict[nn.Module, list[torch.Tensor]] = {layer.gate: [] for layer in model.layers}
        hooks = [g.register_forward_hook(lambda g, _, out, seen=chosen: seen[g].append(out[2])) for g in chosen]
        for replica in range(num):
            (model(ids_of(case, replica, step)) / num).backward()
        for hook in hooks:
            hook.remove()
        if case.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        for gate, seen in chosen.items():
            counts = torch.bincount(torch.cat(seen).reshape(-1), minlength=case.experts).double()
            if case.bias_speed and case.kind == "preset":
                gate.e_score_correction_bias += case.bias_speed * torch.sign(counts.mean() - counts)
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.dear
@given(case=cases())
def test_any_split_equals_one_process(case: Case) -> None:
    def fn(rank: int) -> Any:
        shape = (case.data, case.expert, case.tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "expert", "tensor"))
        model = parallel(Small(KINDS[case.kind], case.experts, case.k), case, mesh)
        optimizer = ZeroOptimizer(
            model, stage=case.stage, mesh=mesh, data_axes=("data", "expert"), clip_norm=case.clip_norm, lr=RATE,
            optimizer=torch.optim.SGD, momentum=0.9, reduce_bucket_size=30, param_persistence_threshold=0,
        )  # fmt: skip
        for step in range(2):
            model(ids_of(case, rank // case.tensor, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            commit_balance(model, optimizer.comm)
        found = whole_state_dict(model, everywhere=True)
        optimizer.close()
        return found

    expected = reference(case, 2)
    for found in sim.run(case.data * case.expert * case.tensor, fn, seed=case.seed):
        assert list(found) == list(expected)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_names_memory_and_copies_stay(kind: str) -> None:
    plain = Small(KINDS[kind])
    before = {name: (p, p.data_ptr()) for name, p in plain.named_parameters()}
    model = parallelise(plain, presets=(DESCRIBED,))
    assert model is plain
    assert {name: (p, p.data_ptr()) for name, p in model.named_parameters()} == before
    assert isinstance(model.layers[0].experts, (ParallelExperts, KINDS[kind]))
    ids = torch.arange(7) % VOCABULARY
    assert float(copy.deepcopy(model)(ids)) == float(model(ids))
    parallelise(model, presets=(DESCRIBED,))  # a second time changes nothing
    assert float(Small(KINDS[kind])(ids)) == pytest.approx(float(model(ids)), rel=1e-12)


def test_the_bias_of_routers_stays_in_single_precision() -> None:
    """Steps of 0.001 would be lost in bfloat16, where 0.3 is followed by 0.302."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = Small().float()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.small(ids)
            return found

    config = {
        "train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "moe": {"enabled": True, "bias_speed": 0.001},
    }  # fmt: skip
    model = Net()
    gate: Any = model.small.layers[0].gate
    gate.e_score_correction_bias.fill_(0.3)
    engine = initialize(config, model)[0]
    assert gate.weight.dtype is torch.bfloat16
    assert gate.e_score_correction_bias.dtype is torch.float32
    engine.backward(engine(torch.arange(7)))
    engine.step()
    moved = (gate.e_score_correction_bias - 0.3).abs()
    assert float(moved.max()) == pytest.approx(0.001, abs=1e-6)
    low = Small().bfloat16()
    parallelise(low)
    assert low.layers[0].gate.e_score_correction_bias.dtype is torch.float32


def test_states_of_whole_models_load_at_any_ep_size() -> None:
    whole = Small()
    fill(whole, seed=1)

    def fn(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
        with torch.device("meta"):
            model = Small()
        parallelise(model, ep_size=2)
        model.to_empty(device="cpu")
        with pytest.raises(ValueError, match="does not know the other ranks"):
            whole_state_dict(model)
        model.load_state_dict(whole.state_dict())
        assert model.layers[0].experts.down_proj.shape[0] == 2
        use_mesh(model, mesh)
        return whole_state_dict(model)

    first, second = sim.run(2, fn)
    torch.testing.assert_close(first, dict(whole.state_dict()), rtol=0, atol=0)
    assert second == {}


@pytest.mark.dear
def test_a_section_alone_does_it() -> None:
    document = {
        "train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": RATE}}, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3}, "moe": {"enabled": True, "ep_size": 2, "chunks": 2, "bias_speed": 0.1},
    }  # fmt: skip
    samples = [torch.arange(5 * i, 5 * i + 5) % VOCABULARY for i in range(4)]

    def fn(rank: int) -> Any:
        engine, _, _, _ = initialize(document, Small())
        share = len(samples) // (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
        losses = []
        for _ in range(3):
            mine = samples[rank * share : (rank + 1) * share]
            loss = engine(torch.cat(mine)) / len(mine)
            engine.backward(loss)
            engine.step()
            losses.append(engine.record.metrics["moe/layers.1.experts/load"])
        state = whole_state_dict(engine.module, everywhere=True)
        engine.destroy()
        return losses, state

    (loads, found), *_ = sim.run(4, fn)
    plain = Small()
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for _ in range(3):
        chosen: dict[nn.Module, list[torch.Tensor]] = {layer.gate: [] for layer in plain.layers}
        hooks = [g.register_forward_hook(lambda g, _, out, seen=chosen: seen[g].append(out[2])) for g in chosen]
        for sample in samples:
            (plain(sample) / 4).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for gate, seen in chosen.items():
            hooks.pop().remove()
            counts = torch.bincount(torch.cat(seen).reshape(-1), minlength=4).double()
            gate.e_score_correction_bias += 0.1 * torch.sign(counts.mean() - counts)
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-9, atol=1e-9)
    assert all(1 <= load <= 4 for load in loads)


@pytest.mark.dear
def test_checkpoints_load_at_another_ep_size(tmp_path: Path) -> None:
    """Saved with experts on two ranks, loaded on four, the bias of routers too."""

    def fn(ep_size: int, steps: range, save: bool) -> Any:
        document = {
            "train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}},
            "zero_optimization": {"stage": 3},
            "moe": {"enabled": True, "ep_size": ep_size, "bias_speed": 0.1},
        }  # fmt: skip

        def run(rank: int) -> Any:
            engine, _, _, _ = initialize(document, Small())
            if not save:
                engine.load_checkpoint(tmp_path)
            for step in steps:
                engine.backward(engine((torch.arange(6) * (rank + 1) + step) % VOCABULARY))
                engine.step()
            if save:
                engine.save_checkpoint(tmp_path)
            found = whole_state_dict(engine.module)
            engine.destroy()
            return found

        return sim.run(4, run)[0]

    fn(2, range(2), True)
    resumed = fn(4, range(2, 4), False)
    torch.testing.assert_close(resumed, fn(2, range(4), True), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ep_size": 3}, r"4 experts of DeepseekV3Experts on ep_size=3 ranks; .* one of \[1, 2, 4\]"),
        ({"chunks": 3}, "chunks=3 of 4 experts on a rank"),
        ({"modules": ("nothing.*",)}, "no experts were found in Small; known are MixtralExperts, .* presets="),
        ({"modules": "*"}, r"modules='\*'; it is a sequence"),
        ({"presets": (ExpertsPreset(experts="DeepseekV3Experts", up="w1"),)}, r"has the parameters .*'gate_up_proj'"),
        ({"presets": (ExpertsPreset(experts="DeepseekV3Experts", transposed=True),)}, "which its preset .* not fit"),
        (
            {"presets": (ExpertsPreset(experts="DeepseekV3Experts", balance_bias="gate.bias"),)},
            r"Block has no buffer 'gate\.bias'",
        ),
        ({"bias_speed": -1.0}, "not negative"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parallelise(Small(), **options)


def test_sections_that_cannot_be() -> None:
    both = {"train_batch_size": 4, "mesh": {"axes": {"data": 2, "expert": 2}}, "moe": {"enabled": True, "ep_size": 4}}
    with pytest.raises(ValueError, match=r"moe\.ep_size = 4, and mesh\.axes has .*'expert': 2"):
        load(both, world_size=4)
    given = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": RATE}}, "moe": {"enabled": True}}
    with pytest.raises(ValueError, match="no experts were found in Small"):
        initialize(given, Small(Plain))
    described = {"experts": "Plain", "up": "w_in", "down": "w_out", "gated": False, "activation": "phi"}
    engine, *_ = initialize({**given, "moe": {"enabled": True, "presets": [described]}}, Small(Plain))
    assert isinstance(engine.module.layers[0].experts, ParallelExperts)
    engine.destroy()


def test_ranks_that_are_not_known_or_elsewhere() -> None:
    with pytest.raises(ValueError, match="does not know the other ranks"):
        parallelise(Small(), ep_size=2)(torch.arange(3))
    with pytest.raises(ValueError, match="is parallel already, with ep_size=2"):
        parallelise(parallelise(Small(), ep_size=2))


# -- transformers itself ----------------------------------------------------------------------------------------------

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
SHARP = {"rtol": 1e-6, "atol": 1e-9}
"""float64, but routers of transformers round the weights to float32, of which ε/2 is 6e-8."""


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(seed))


EACH = [
    pytest.param(family, dtype, marks=[] if (family, dtype) == ("mixtral", torch.float64) else [pytest.mark.slow])
    for family in FAMILIES
    for dtype in (torch.float64, torch.float32)
]


@needs_transformers
@pytest.mark.parametrize(("family", "dtype"), EACH)
def test_logits_and_gradients_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    theirs = of_transformers(family).to(dtype)
    ours = parallelise(copy.deepcopy(theirs))
    assert sum(isinstance(m, ParallelExperts) for m in ours.modules()) == (1 if "deepseek" in family else 2)
    ids = tokens(0)
    wanted, got = (m(input_ids=ids, labels=ids, output_router_logits=True) for m in (theirs, ours))
    # Sums of at most 32 products in another order, ε each, through two layers that amplify at most tenfold.
    close = SHARP if dtype is torch.float64 else {"rtol": 32 * 10 * 1.2e-7, "atol": 32 * 10 * 1.2e-7}
    torch.testing.assert_close(got.logits, wanted.logits, **close)
    torch.testing.assert_close(got.router_logits, wanted.router_logits, **close)
    torch.testing.assert_close(got.loss, wanted.loss, **close)
    wanted.loss.backward()
    got.loss.backward()
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **close, msg=lambda m, n=name: f"{n}: {m}")


def steps_of(model: Any, optimizer: Any, ids: list[torch.Tensor], steps: int, clip: float = 0.0) -> None:
    for _ in range(steps):
        for batch in ids:
            (model(input_ids=batch, labels=batch, output_router_logits=True).loss / len(ids)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ep_size", "data"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("stage", [0, 3])
def test_training_is_that_of_transformers(family: str, ep_size: int, data: int, stage: int) -> None:
    """Experts, routers, the router loss of the model, clipping: two steps of SGD."""
    num, clip = ep_size * data, 0.1
    theirs = of_transformers(family)
    start = copy.deepcopy(theirs)
    steps_of(theirs, torch.optim.SGD(theirs.parameters(), lr=RATE), [tokens(r) for r in range(num)], 2, clip)

    def fn(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (data, ep_size), mesh_dim_names=("data", "expert"))
        model = parallelise(copy.deepcopy(start), ep_size=ep_size, mesh=mesh)
        optimizer = ZeroOptimizer(
            model, stage=stage, mesh=mesh, data_axes=("data", "expert"), clip_norm=clip, lr=RATE,
            optimizer=torch.optim.SGD, param_persistence_threshold=0,
        )  # fmt: skip
        steps_of(model, optimizer, [tokens(rank)], 2)
        found = whole_state_dict(model)
        optimizer.close()
        return found

    found = sim.run(num, fn)[0]
    start.load_state_dict(found)
    torch.testing.assert_close(found, dict(theirs.state_dict()), **SHARP)


@pytest.mark.slow
@needs_transformers
def test_saved_as_transformers_saves(tmp_path: Any) -> None:
    """Trained on two ranks, written by save_pretrained, read by from_pretrained."""
    start = of_transformers("mixtral")

    def fn(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
        model = parallelise(copy.deepcopy(start), ep_size=2, mesh=mesh)
        state = whole_state_dict(model)
        if rank == 0:
            model.save_pretrained(tmp_path, state_dict=state)

    sim.run(2, fn)
    again = type(start).from_pretrained(tmp_path, dtype=torch.float64)
    again.set_experts_implementation("eager")
    ids = tokens(1)
    torch.testing.assert_close(again.train()(ids).logits, start(ids).logits, rtol=0, atol=0)


@pytest.mark.slow
@needs_transformers
def test_recomputation_of_transformers() -> None:
    """Gradient checkpointing: the same gradients, and every token counts once."""
    plain, checkpointed = (parallelise(of_transformers("mixtral")) for _ in range(2))
    checkpointed.gradient_checkpointing_enable()
    ids = tokens(2)
    for model in (plain, checkpointed):
        model(input_ids=ids, labels=ids).loss.backward()
    for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)
    for model in (plain, checkpointed):
        assert model.model.layers[0].mlp.experts.tally.sum(1).tolist() == [28, 28]


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    found = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:  # they begin as 0, and what is multiplied by them has no gradient then
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if "lora_A" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return found


@pytest.mark.slow
@needs_transformers
@needs_peft
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 3), (4, 3)])
def test_lora_on_experts(family: str, ranks: int, stage: int) -> None:
    theirs = with_adapters(of_transformers(family))
    start = copy.deepcopy(theirs)
    steps_of(
        theirs, torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=RATE),
        [tokens(r) for r in range(ranks)], 2, clip=0.1,
    )  # fmt: skip

    def fn(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("expert",))
        model = parallelise(copy.deepcopy(start), ep_size=ranks, mesh=mesh)
        optimizer = ZeroOptimizer(
            model, stage=stage, mesh=mesh, data_axes=("expert",), clip_norm=0.1, lr=RATE, optimizer=torch.optim.SGD,
            param_persistence_threshold=0, params=[p for p in model.parameters() if p.requires_grad],
        )  # fmt: skip
        steps_of(model, optimizer, [tokens(rank)], 2)
        found = whole_state_dict(model)
        optimizer.close()
        return found

    found = sim.run(ranks, fn)[0]
    torch.testing.assert_close(found, dict(theirs.state_dict()), **SHARP)
    moved = [n for n, value in start.state_dict().items() if not torch.equal(value, found[n])]
    assert moved
    assert all("lora_" in name for name in moved)


@pytest.mark.slow
@needs_transformers
@needs_peft
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_merged_adapters(family: str) -> None:
    """peft's own merge, of each rank's experts."""
    theirs = with_adapters(of_transformers(family))

    def fn(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
        model: Any = parallelise(copy.deepcopy(theirs), ep_size=2, mesh=mesh)
        with model.disable_adapter():
            off = model(input_ids=tokens(0)).logits
        return off, whole_state_dict(model.merge_and_unload())

    off, found = sim.run(2, fn)[0]
    with theirs.disable_adapter():
        torch.testing.assert_close(off, theirs(input_ids=tokens(0)).logits, **SHARP)
    torch.testing.assert_close(found, dict(theirs.merge_and_unload().state_dict()), **SHARP)


@pytest.mark.slow
@needs_transformers
@needs_peft
def test_lora_after_it_is_refused() -> None:
    model = with_adapters(parallelise(of_transformers("mixtral"), ep_size=2))
    with pytest.raises(ValueError, match="got an adapter after parallelise"):
        model(input_ids=tokens(0))

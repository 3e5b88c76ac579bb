"""The proof refuses wrong plans with what differs; it needs no process group and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")
import transformers
from tests.tensor.hub import class_of, config_of, model_of

from zoo import sim
from zoo.comm import Communicator
from zoo.tensor import Plan, Rule, lockstep, plan_of, prove
from zoo.tensor import proof as proofs
from zoo.tensor.shrinking import few


def changed(plan: Plan, module: str, **fields: Any) -> Plan:
    """With other fields of the rules for modules of that last name."""
    rules = [replace(r, **fields) if r.module.endswith("." + module) else r for r in plan.rules]
    assert rules != list(plan.rules)
    return replace(plan, rules=tuple(rules))


def without(plan: Plan, module: str) -> Plan:
    rules = tuple(rule for rule in plan.rules if not rule.module.endswith("." + module))
    assert len(rules) < len(plan.rules)
    return replace(plan, rules=rules)


WRONG: dict[str, tuple[str, Callable[[Plan], Plan], str]] = {
    "GPT-2 without a count": ("gpt2", lambda p: replace(p, counts=p.counts[:1]), "the split model fails"),
    "GPT-2 laid out as BLOOM": ("gpt2", lambda p: changed(p, "c_attn", rows="head part=3 dim"), "logits differs"),
    "BLOOM laid out as GPT-2": (
        "bloom",
        lambda p: changed(p, "query_key_value", rows="part=3 head dim"),
        "logits differs",
    ),
    "BLOOM without slopes": ("bloom", lambda p: replace(p, takes=()), "the split model fails"),
    "BLOOM with slopes of others": (
        "bloom",
        lambda p: replace(p, takes=(replace(p.takes[0], dims="head batch"),)),
        "logits differs",
    ),
    "Llama without a count": ("llama", lambda p: replace(p, counts=()), "the split model fails"),
    "Llama's keys as queries": ("llama", lambda p: changed(p, "k_proj", rows="kv dim", cut="dim"), "is refused"),
    "Llama's output whole": ("llama", lambda p: without(p, "o_proj"), "the split model fails"),
    "Phi-3's halves as one": ("phi3", lambda p: changed(p, "gate_up_proj", rows="inner"), "is refused"),
    "Qwen 3 with norms that are whole": (
        "qwen3",
        lambda p: without(p, "q_norm"),
        "gradient of model.layers.0.self_attn.q_norm.weight differs",
    ),
    "Mixtral's halves as one": (
        "mixtral",
        lambda p: changed(p, "experts", inside=(("gate_up_proj", 1, "inner part=2"), ("down_proj", 2, "inner"))),
        "logits differs",
    ),
    "DeepSeek without its rotary key": (
        "deepseek_v3",
        lambda p: without(p, "kv_a_proj_with_mqa"),
        "gradient of model.embed_tokens.weight differs",
    ),
    "T5 without biases of heads": ("t5", lambda p: without(p, "relative_attention_bias"), "the split model fails"),
    "OPT with a head in parts": (
        "opt",
        lambda p: replace(p, rules=tuple(replace(r, gather=False) for r in p.rules)),
        "logits has the shape",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", WRONG)
def test_wrong_plans_are_refused_with_what_differs(case: str) -> None:
    name, change, told = WRONG[case]
    plan = change(plan_of(model_of(name)))
    for _ in range(2):  # what was found is kept
        with pytest.raises(ValueError, match=f"plan '{plan.name}' of .* at degree 2 .*{told}"):
            prove(class_of(name), config_of(name), plan, 2)


def test_a_plan_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    first = prove(model, model.config, plan_of(model), 2)
    monkeypatch.setattr(proofs, "random_model", None)
    assert prove(model, model.config, plan_of(model), 2) is first


def test_a_plan_with_other_sizes_than_the_configuration_is_told() -> None:
    plan, config = plan_of(model_of("llama")), config_of("llama")
    with pytest.raises(ValueError, match="has 6 query heads, and the configuration has 9"):
        prove(class_of("llama"), config, replace(plan, sizes=(("head", 6),)), 2)
    with pytest.raises(ValueError, match="width=77, which is no size of the configuration"):
        prove(class_of("llama"), config, replace(plan, sizes=(*plan.sizes, ("width", 77))), 2)


def test_plans_with_another_attention_are_proved_apart() -> None:
    """Falcon's slopes come in the mask with one, and beside it with the other."""
    config = config_of("falcon-heads")
    plan = plan_of(model_of("falcon-heads"))
    found = []
    for attention in ("sdpa", "eager"):
        config._attn_implementation = attention
        found.append(prove(class_of("falcon-heads"), config, plan, 2))
    assert found[0] is not found[1]
    for name in ("falcon-heads", "gpt_neo"):
        config = config_of(name)
        config._attn_implementation = "flash_attention_2"  # which needs a device
        prove(class_of(name), config, plan_of(model_of(name)), 2)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "kind",
    ["BertModel", "BertForSequenceClassification", "BertForTokenClassification", "LlamaModel", "T5EncoderModel",
     "LlamaForSequenceClassification", "GPT2ForSequenceClassification", "OPTForQuestionAnswering"],
)  # fmt: skip
def test_models_with_other_heads_and_without_are_proved(kind: str) -> None:
    name = next(name for name in ("bert", "gpt2", "llama", "opt", "t5") if kind.lower().startswith(name))
    with torch.device("meta"):
        model = getattr(transformers, kind)(config_of(name))
    found = prove(model, model.config, plan_of(model), 2)
    assert max(found.outputs, found.gradients or 0.0) < 1e-13


def test_a_configuration_of_several_is_told() -> None:
    config = transformers.Gemma3Config()
    with pytest.raises(ValueError, match="Gemma3Config is made of several configurations"):
        prove(class_of("llama"), config, plan_of(model_of("llama")), 2)


def test_a_model_that_fails_unsplit_is_told() -> None:
    class Broken(class_of("llama")):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not today")

    with pytest.raises(ValueError, match=r"cannot be proved: a small Broken in fp64 fails unsplit .*not today"):
        prove(Broken, config_of("llama"), plan_of(model_of("llama")), 2)

    class Silent(class_of("llama")):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return {"logits": self.lm_head.weight * torch.nan}

    with pytest.raises(ValueError, match=r"a small Silent in fp64 fails unsplit .*outputs are logits.* not finite"):
        prove(Silent, config_of("llama"), plan_of(model_of("llama")), 2)


def test_ranks_of_a_job_prove_alone_and_change_nothing() -> None:
    """Also ranks that are simulated themselves, without gradients, on another device, with random numbers of theirs."""
    model = model_of("gpt2", n_head=4)

    def fn(rank: int) -> None:
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        with torch.device("meta"), torch.inference_mode():
            found = prove(model, model.config, plan_of(model), 2)
        assert found.gradients is not None
        assert torch.equal(torch.get_rng_state(), before)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2

    proofs._PROVED.clear()
    sim.run(2, fn, seed=0)


def test_ranks_in_lockstep_sum_and_gather_in_order() -> None:
    def fn(comm: Communicator) -> list[float]:
        value = torch.tensor([float(comm.rank + 1)])
        comm.all_reduce(value).wait()
        out = torch.empty(3)
        comm.all_gather(out, value + comm.rank).wait()
        return out.tolist()

    assert lockstep.run(3, fn) == [[6.0, 7.0, 8.0]] * 3


def test_ranks_in_lockstep_that_part_are_told() -> None:
    def different(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(1 + comm.rank)).wait()

    with pytest.raises(ValueError, match=r"different things: a sum of \(1,\), a sum of \(2,\)"):
        lockstep.run(2, different)

    def fewer(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(1)).wait()

    with pytest.raises(ValueError, match=r"a sum of \(1,\), nothing more"):
        lockstep.run(2, fewer)

    def raising(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(torch.ones(1)).wait()

    with pytest.raises(KeyError, match="mine"):
        lockstep.run(2, raising)

    with pytest.raises(NotImplementedError, match="op='max' in lockstep"):
        lockstep.run(1, lambda comm: comm.all_reduce(torch.ones(1), op="max"))


@given(kv=st.integers(1, 40), each=st.integers(1, 9), degree=st.integers(1, 8))
def test_fewer_heads_divide_as_the_many_do(kv: int, each: int, degree: int) -> None:
    if kv * each < degree:
        return
    num, fewer = few(kv * each, kv, degree)
    assert num == fewer * each
    assert degree <= num <= kv * each
    assert (num % degree == 0, fewer % degree == 0) == (kv * each % degree == 0, kv % degree == 0)


def test_random_models_have_no_parameter_that_is_constant() -> None:
    model = proofs.random_model(class_of("gpt2"), config_of("gpt2"))
    assert all(p.dtype == torch.float64 and p.std() > 0 for p in model.parameters())
    again = proofs.random_model(class_of("gpt2"), config_of("gpt2"))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_rule_for_a_module_that_is_not_there_is_told() -> None:
    plan = plan_of(model_of("llama"))
    more = replace(plan, rules=(*plan.rules, Rule(module="model.layers.*.other", rows="a", cut="a")))
    with pytest.raises(ValueError, match="at degree 2 is refused: plan 'llama' has rules for"):
        prove(class_of("llama"), config_of("llama"), more, 2)


def test_a_degree_that_is_too_large_is_told() -> None:
    """As it is where weights are split, and not as a fault of the plan."""
    with pytest.raises(ValueError, match=r"refused: degree 99 with .* so the degree is at most \d+\.$"):
        prove(class_of("llama"), config_of("llama"), plan_of(model_of("llama")), 99)

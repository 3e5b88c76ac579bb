"""Patterns of parameter names and injection policies are read as plans, which compute what the whole model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.tensor.models import DIM, Block, Decoder, Shape
from tests.tensor.test_splitting import tokens, weights_of
from torch import nn

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import boxes_of, split_of
from zoo.tensor import Plan, plan_of_injection_policy, plan_of_partition_config, prove, split


def specs(shape: Shape) -> dict[str, Any]:
    """What a program would write for the small decoder."""
    queries, keys = shape.heads * DIM, shape.heads_of_kv * DIM
    fused: dict[str, Any] = {"patterns": [r".*\.qkv\.weight$"]}
    if shape.layout == "parts":
        equal = shape.heads == shape.heads_of_kv
        fused |= {"shape": [3, -1] if equal else [[queries, keys, keys], -1], "partition_dim": 0}
    up: dict[str, Any] = {"patterns": [r".*\.up\.weight$"], "partition_type": "column"}
    norms = {"patterns": [r".*attention\.norm\."], "partition_type": "skip", "grad_allreduce": True}
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*attention\.[qkv]\.weight$"], "partition_type": "column"}, fused,
            {"patterns": [r".*attention\.out\.weight$", r".*\.down\.weight$"], "partition_type": "row"},
            {**up, "shape": [2, -1], "partition_dim": 0} if shape.packed else up,
            *([norms] if shape.norm else []),
            {"patterns": ["^head"], "partition_type": "column", "gather_output": True},
        ],
    }  # fmt: skip


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv, layout = draw(st.integers(1, 4)), draw(st.sampled_from(["apart", "parts", "heads"]))
    return Shape(
        heads=kv * draw(st.integers(1, 3)), kv=kv, inner=draw(st.integers(5, 9)), vocab=draw(st.integers(5, 11)),
        layout=layout, bias=draw(st.booleans()), tied=draw(st.booleans()), norm=draw(st.booleans()),
        packed=draw(st.booleans()),
    )  # fmt: skip


def check(shape: Shape, plan: Plan, degree: int) -> None:
    """Outputs and gradients of the split model are those of the whole one."""
    whole, ids = Decoder(shape), tokens(shape)
    logits = whole(ids)
    (logits * weights_of(logits)).sum().backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}

    def fn(rank: int) -> None:
        comm, model = Communicator(), Decoder(shape)
        split(model, plan, comm)
        found = model(ids)
        torch.testing.assert_close(found, logits, rtol=1e-12, atol=1e-12)
        (found * weights_of(found)).sum().backward()
        for name, parameter in model.named_parameters():
            said, grad, there = split_of(parameter), parameter.grad, expected[name]
            assert grad is not None
            assert there is not None
            if said.partial:
                comm.all_reduce(grad).wait()
            if said.box is None:
                torch.testing.assert_close(grad, there, rtol=1e-11, atol=1e-11, msg=name)
                continue
            for laid in boxes_of(said.box):
                torch.testing.assert_close(grad[laid.here.ranges], there[laid.box.ranges], rtol=1e-11, atol=1e-11)

    sim.run(degree, fn, seed=0)


@examples(times=0.3)
@given(shape=shapes(), degree=st.integers(2, 4))
@example(shape=Shape(heads=9, kv=3, norm=True), degree=2)
@example(shape=Shape(heads=9, kv=3, layout="parts", packed=True), degree=4)
@example(shape=Shape(heads=4, kv=4, layout="parts", tied=False), degree=3)
def test_a_partition_config_computes_what_the_whole_model_does(shape: Shape, degree: int) -> None:
    degree = min(degree, shape.heads)
    plan = plan_of_partition_config(Decoder(shape), specs(shape), degree)
    modules = {rule.module for rule in plan.rules}
    assert {"blocks.*.attention.out", "blocks.*.perceptron.down", "head"} <= modules
    assert ("words" in modules) == shape.tied  # one parameter with the head
    check(shape, plan, degree)


@examples(times=0.3)
@given(shape=shapes(), degree=st.integers(2, 4), named=st.sampled_from([Block, "Block", ""]))
def test_an_injection_policy_computes_what_the_whole_model_does(shape: Shape, degree: int, named: Any) -> None:
    if shape.layout == "parts" or shape.packed or shape.norm:
        return  # which features belong together is not in such a policy
    rows = ("attention.out", ".perceptron.down")
    plan = plan_of_injection_policy(Decoder(shape), {named: rows} if named else rows)
    assert not {"head", "words"} & {rule.module for rule in plan.rules}
    check(shape, plan, min(degree, shape.heads))


class Wide(nn.Module):
    """Layers whose features are of several kinds, and one for each layer's number."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(3, 12) for _ in range(3))
        self.down = nn.Linear(12, 3)
        self.place = nn.Embedding(5, 3)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"shape": [2, -1]}, "up.*: rows 'part=2 inner', cut 'inner'"),
        ({"shape": [[8, 4], -1]}, "up.*: rows '(inner=8 inner=4)', cut 'inner'"),
        ({"shape": [2, -1, 3], "partition_dim": 1}, "up.*: rows 'outer0=2 inner', cut 'inner'"),
        ({"shape": [-1, 3, 3], "partition_dim": 0}, "up.*: rows 'inner within0=3', cut 'inner'"),
        ({"gather_output": True}, "up.*: rows 'inner', cut 'inner', outputs gathered"),
        ({"patterns": [r"up\.[02]\.weight"]}, "up.0: rows 'inner', cut 'inner'"),
        ({"patterns": ["down"], "partition_type": "ROW", "shape": [-1, 2]},
         "down: columns 'part=2 inner', cut 'inner'"),
        ({"patterns": ["down"], "partition_type": "row", "shape": [-1, [4, 8]]},
         "down: columns '(inner=4 inner=8)', cut 'inner'"),
        ({"patterns": ["place"]}, "place: rows 'entry', cut 'entry'"),
    ],
)  # fmt: skip
def test_a_shape_is_named_dims(spec: dict[str, Any], expected: str) -> None:
    plan = plan_of_partition_config(Wide(), {"layer_specs": [{"patterns": ["up"], **spec}]}, 2)
    assert expected in map(str, plan.rules), plan
    assert Plan.of_data(plan.as_data()) == plan


def test_blocks_of_other_sizes_are_dealt_each_for_itself() -> None:
    plan = plan_of_partition_config(Wide(), {"layer_specs": [{"patterns": ["up"], "shape": [[8, 4], -1]}]}, 2)
    assert [plan.cut(plan.rules[0], 12, 2, rank).runs for rank in (0, 1)] == [((0, 4), (8, 10)), ((4, 8), (10, 12))]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"layer_specs": [{"patterns": ["nothing"]}]}, "no layer of Wide matches column for nothing"),
        ({"layer_specs": [{"patterns": ["up"], "kind": 1}]}, "no key 'kind'; there are patterns, partition_type"),
        ({"layer_spec": []}, "no key 'layer_spec', perhaps 'layer_specs'"),
        ({"layer_specs": [{"patterns": ["up"], "partition_type": "rows"}]}, "allowed are 'column', 'row', 'skip'"),
        ({"layer_specs": [{"patterns": ["up("]}]}, "'up\\(' is no regular expression"),
        ({"layer_specs": [{"patterns": "up"}]}, "patterns='up'; it takes a list, each item a text"),
        ({"layer_specs": [{"patterns": None}]}, "patterns=None; it takes a list, each item a text"),
        ({"layer_specs": {"patterns": ["up"]}}, "layer_specs is .*; it takes a list"),
        ({"layer_specs": ["up"]}, "one of partition_config.layer_specs is 'up'; it takes a mapping"),
        ({"layer_specs": [{"patterns": ["up"], "shape": 3}]}, "the shape of a spec is 3; it takes a list"),
        ({"layer_specs": [{"patterns": ["up"], "gather_output": "false"}]}, "='false'; it takes true or false"),
        ({"layer_specs": [{"patterns": ["up"], "partition_dim": "0"}]}, "='0'; it takes an integer or null"),
        ({"layer_specs": [{"patterns": ["up"], "model_types": "llama"}]}, "model_types='llama'; it takes a list"),
        ({"layer_specs": [{"patterns": ["up"]}], "lm_head_patterns": "head"}, "lm_head_patterns='head'; it takes a"),
        ({"layer_specs": [{"patterns": ["up"]}], "strict_mode": "false"}, "='false'; it takes true or false"),
        ({"layer_specs": [{"patterns": ["up"]}], "tp_size": "2"}, "tp_size='2'; it takes an integer"),
        ({"layer_specs": [{"patterns": ["up"], "shape": [5, -1]}]}, "up.0: .* 5 equal blocks of 12 features"),
        ({"layer_specs": [{"patterns": ["up"], "shape": [[8, 5], -1]}]}, r"weight \(12, 3\)"),
        ({"layer_specs": [{"patterns": ["up"], "shape": [-1, 4]}]}, r"weight \(12, 3\)"),
        ({"layer_specs": [{"patterns": ["up"], "shape": [12, 1], "partition_dim": 1}]}, "which 'row' deals"),
        ({"layer_specs": [{"patterns": ["up"], "shape": [3, -1], "partition_dim": 2}]}, "partition_dim 2 of a shape"),
        ({"layer_specs": [{"patterns": ["up"], "shape": [0, -1]}]}, "positive integers and -1"),
        ({"layer_specs": [{"patterns": ["place"], "shape": [5, -1]}]}, "place is a Embedding"),
        ({"layer_specs": [{"patterns": ["up"]}], "strict_mode": True}, "no spec is for down.weight"),
        ({"layer_specs": [{"patterns": ["up"]}], "tp_size": 3}, "tp_size is 3, and the degree 2"),
        ({"layer_specs": [{"patterns": ["up"], "partition_type": "skip", "gather_output": True}]}, "is for .*'column'"),
        ({"layer_specs": [{"patterns": ["up"], "grad_allreduce": True}]}, "is for partition_type 'skip'"),
    ],
)  # fmt: skip
def test_what_no_rule_says_is_refused_by_name(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan_of_partition_config(Wide(), config, 2)


def test_what_stays_whole_and_the_first_spec_count() -> None:
    skip = {"patterns": [r"up\.1\."], "partition_type": "skip"}
    plan = plan_of_partition_config(Wide(), {"layer_specs": [skip, {"patterns": ["up"]}]}, 2)
    assert [rule.module for rule in plan.rules] == ["up.0", "up.2"]
    assert plan_of_partition_config(Wide(), {"layer_specs": [skip]}, 2).rules == ()
    other = {"patterns": ["up"], "model_types": ["llama"]}
    assert plan_of_partition_config(Wide(), {"layer_specs": [other, skip]}, 2).rules == ()


def test_specs_that_no_parameter_fits_are_told(caplog: pytest.LogCaptureFixture) -> None:
    up, down = {"patterns": [r".*\.up\.weight$"]}, {"patterns": [r".*\.down\.weight$"], "partition_type": "row"}
    wrong = {"patterns": [r".*\.quary\.weight$"]}
    plan = plan_of_partition_config(Decoder(Shape()), {"layer_specs": [up, down]}, 2)
    assert not caplog.text
    assert plan_of_partition_config(Decoder(Shape()), {"layer_specs": [up, down, wrong]}, 2) == plan
    assert r"no parameter of Decoder matches column for .*\.quary\.weight$; what they were meant for" in caplog.text
    caplog.clear()
    plan_of_partition_config(Decoder(Shape()), {"layer_specs": [up, down, {**wrong, "model_types": ["x"]}]}, 2)
    assert not caplog.text


def test_heads_that_are_not_said_are_refused_by_name() -> None:
    shape = Shape(heads=4, kv=1, layout="parts")
    for wrong in (None, [3, -1], [[14, 5, 5], -1]):
        config = {"layer_specs": [{"patterns": [r".*\.qkv\.weight$"], **({"shape": wrong} if wrong else {})}]}
        with pytest.raises(ValueError, match=r"blocks\.0\.attention\.qkv.*16, 4, 4"):
            plan_of_partition_config(Decoder(shape), config, 2)
    tied = [{"patterns": ["words"], "partition_type": "skip"}, {"patterns": ["head"], "gather_output": True}]
    with pytest.raises(ValueError, match="head and words have one weight"):
        plan_of_partition_config(Decoder(Shape(tied=True)), {"layer_specs": tied}, 2)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"Layer": ("attention.out",)}, "is for Layer, and Decoder has no such module; it has Attention, Block"),
        ({Block: ("attention.o",)}, "names attention.o, and no linear layer of Block is named so; it has attention.q"),
        (("attention.o",), "no list of modules whose layers have all of these names"),
        ({dict: ("out",)}, "is no module: policies that put kernels in"),
        ("out", "an injection policy is 'out'; it takes a list"),
        *(
            (policy, "it takes names of row-parallel layers")
            for policy in ([], {}, [3], [""], {Block: ()}, {Block: "."})
        ),
    ],
)
def test_a_policy_that_fits_nothing_is_refused(policy: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan_of_injection_policy(Decoder(Shape()), policy)


SELF, MLP = r".*\.self_attn\.", r".*\.mlp\."
LLAMA = [
    {"patterns": [rf"{SELF}[qkv]_proj\.weight$", rf"{MLP}(up|gate)_proj\.weight$"]},
    {"patterns": [rf"{SELF}o_proj\.weight$", rf"{MLP}down_proj\.weight$"], "partition_type": "row"},
]
HEAD = {"patterns": ["lm_head"], "gather_output": True}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"preset": "llama"}),
    ("llama", {"config": {"layer_specs": [*LLAMA, HEAD]}}),
    ("llama", {"config": {"layer_specs": [HEAD]}, "preset": "llama"}),
    ("llama", {"config": {"layer_specs": LLAMA[:1], "use_default_specs": True}, "preset": "llama"}),
    ("qwen3", {"config": {"layer_specs": LLAMA}}),  # norms of heads are the family's
    ("mixtral", {"preset": "mixtral"}),  # its experts are one tensor each today, and stay whole
    ("bloom", {"preset": "bloom"}),
    ("phi3", {"config": {"layer_specs": [{"patterns": [rf"{MLP}gate_up_proj\.weight$"], "shape": [2, -1]},
                                         {"patterns": [rf"{SELF}qkv_proj\.weight$"]}, LLAMA[1]]}}),
    ("gpt2", {"config": {"layer_specs": [{"patterns": [r".*\.c_attn\.weight", r".*\.c_fc\.weight"]},
                                         {"patterns": [r".*\.c_proj\.weight"], "partition_type": "row"}]}}),
    ("t5", {"config": {"layer_specs": [{"patterns": [r".*\.(q|k|v|wi)\.weight"]},  # biases of heads are the family's
                                       {"patterns": [r".*\.(o|wo)\.weight"], "partition_type": "row"}]}}),
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "given"), CONFIGS)
def test_models_of_a_family_are_proved(family: str, given: dict[str, Any]) -> None:
    model = pytest.importorskip("tests.tensor.hub").model_of(family)
    plan = plan_of_partition_config(model, given.get("config"), 2, preset=given.get("preset"))
    found = prove(model, model.config, plan, 2)
    assert max(found.outputs, found.gradients or 0.0) < 1e-13
    assert any(rule.rows for rule in plan.rules)
    assert any(rule.columns for rule in plan.rules)


POLICIES = [
    ("llama", {"LlamaDecoderLayer": ("self_attn.o_proj", "mlp.down_proj")}),
    ("bert", {"BertLayer": ("output.dense",)}),
    ("gpt2", {"GPT2Block": ("attn.c_proj", "mlp.c_proj")}),
    ("mixtral", ("o_proj",)),
    ("t5", {"T5Block": ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}),
    ("deepseek_v3", ("self_attn.o_proj", "mlp.down_proj", "mlp.shared_experts.down_proj")),
    ("qwen2_moe", ("self_attn.o_proj", "mlp.shared_expert.down_proj", "mlp.down_proj")),
    ("gpt_oss", ("o_proj",)),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "policy"), POLICIES)
def test_policies_for_models_of_a_family_are_proved(family: str, policy: Any) -> None:
    model = pytest.importorskip("tests.tensor.hub").model_of(family)
    found = prove(model, model.config, plan_of_injection_policy(model, policy), 2)
    assert max(found.outputs, found.gradients or 0.0) < 1e-13


def test_a_configuration_of_another_kind_is_no_family() -> None:
    transformers = pytest.importorskip("transformers")
    model = Decoder(Shape())
    model.config = transformers.PretrainedConfig()  # type: ignore[assignment]
    model.config.model_type = "own"  # type: ignore[union-attr]
    model.get_input_embeddings, model.tp_plan = lambda: model.words, {"blocks.*.attention.q": "colwise"}  # type: ignore[assignment]
    assert plan_of_partition_config(model, specs(Shape()), 2) == plan_of_partition_config(
        Decoder(Shape()), specs(Shape()), 2
    )


def test_a_preset_for_another_layout_of_heads_is_refused() -> None:
    hub = pytest.importorskip("tests.tensor.hub")
    with pytest.raises(ValueError, match=r"qkv_proj: the shape .* 'part=3 inner', and phi3 has there '\(head kv kv\)"):
        plan_of_partition_config(hub.model_of("phi3"), None, 2, preset="phi3")
    with pytest.raises(ValueError, match="no layer of GPT2LMHeadModel matches"):
        plan_of_partition_config(hub.model_of("gpt2"), None, 2, preset="llama")
    with pytest.raises(ValueError, match="preset_model 'gpt2'; there are bloom, chatglm"):
        plan_of_partition_config(hub.model_of("gpt2"), None, 2, preset="gpt2")


def test_heads_that_nothing_cuts_do_not_bound_the_degree() -> None:
    hub = pytest.importorskip("tests.tensor.hub")
    model = hub.model_of("llama", num_attention_heads=2, num_key_value_heads=1, hidden_size=8, vocab_size=11)
    attention = [{"patterns": [r".*self_attn\."], "partition_type": "skip"}]
    plan = plan_of_partition_config(model, {"layer_specs": attention}, 3, preset="llama")
    prove(model, model.config, plan, 3)
    with pytest.raises(ValueError, match=r"with the 2 query heads .* the degree is at most 2"):
        plan_of_partition_config(model, None, 3, preset="llama").share(3, 0)
    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits

    def fn(rank: int) -> None:
        mine = hub.model_of("llama", num_attention_heads=2, num_key_value_heads=1, hidden_size=8, vocab_size=11)
        mine.model.layers[0].mlp.dropout = nn.Dropout(0.1)  # nothing calls it: masks of the perceptron are prepared
        split(mine, plan, Communicator())
        torch.testing.assert_close(mine(ids).logits, expected, rtol=1e-12, atol=1e-12)

    sim.run(3, fn, seed=0)

"""The transformer layer computes what torch's functions composed compute, options change nothing, dropout is one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.transformers_in_torch import OPTIONS, make, next_offset, results, values
from tests.profiles import examples
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zoo.nn import TransformerLayer, TransformerLayerConfig

Tensor = torch.Tensor
RATIOS = st.sampled_from([0.0, 0.1, 0.5, 1.0])


def mask_of(kind: str, batch: int, heads: int, tokens: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    shape = {
        "padding": (batch, 1, 1, tokens),
        "heads": (1, heads, tokens, tokens),
        "all": (batch, heads, tokens, tokens),
    }
    mask = values(*shape[kind], seed=5)
    return torch.where(mask > 1, -10000.0, mask).to(dtype)


@pytest.mark.dear
@examples(times=12)
@given(
    pre=st.booleans(), gelu=st.sampled_from(["none", "tanh"]), heads=st.sampled_from([1, 2, 3]),
    head_size=st.sampled_from([1, 4, 5]), inner=st.sampled_from([None, 1, 7]), batch=st.integers(1, 3),
    tokens=st.sampled_from([1, 2, 7]), kind=st.sampled_from(["none", "padding", "heads", "all"]),
    options=st.sets(st.sampled_from(OPTIONS)), attn=RATIOS, hidden=RATIOS, training=st.booleans(),
    frozen=st.sets(st.integers(0, 11)), strided=st.booleans(),
    seed=st.sampled_from([None, 5, 2**64 - 1]),
)  # fmt: skip
def test_it_is_the_composition_of_torchs_functions(
    pre: bool, gelu: str, heads: int, head_size: int, inner: int | None, batch: int, tokens: int, kind: str,
    options: set[str], attn: float, hidden: float, training: bool, frozen: set[int], strided: bool,
    seed: int | None,
) -> None:  # fmt: skip
    """In fp64. A hundred roundings a number, of 1.1e-16 each, and rows of few numbers whose variance may be small."""
    layer = make(
        hidden_size=heads * head_size, heads=heads, intermediate_size=inner, pre_layer_norm=pre, gelu=gelu, init=7,
        attn_dropout_ratio=attn, hidden_dropout_ratio=hidden, layer_norm_eps=1e-3, seed=seed,
        **{option: option in options for option in OPTIONS},
    ).train(training)  # fmt: skip
    for k, parameter in enumerate(layer.parameters()):
        parameter.requires_grad_(k not in frozen)
    shape = (batch, tokens, heads * head_size)
    x, dy = values(*shape, seed=1), values(*shape, seed=2)
    if strided:
        x, dy = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, dy))
    mask = mask_of(kind, batch, heads, tokens, torch.float64)
    torch.manual_seed(3)
    expected = results(layer, x, mask, dy, oracle=True)
    torch.manual_seed(3)
    got = results(layer, x, mask, dy)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pre", [True, False])
def test_in_lower_precision_it_errs_no_more_than_twice_what_the_composition_does(pre: bool, dtype: torch.dtype) -> None:
    """Against fp64 on the same rounded numbers, as the root mean square of all numbers of a tensor."""
    layer = make(dtype, hidden_size=96, heads=4, pre_layer_norm=pre, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1)
    x, dy = (values(4, 33, 96, seed=k, dtype=dtype) for k in (1, 2))
    mask = torch.where(torch.arange(33) < 30, 0.0, -1000.0).expand(4, 1, 1, 33)
    found = []
    for oracle, wide in ((True, True), (True, False), (False, False)):
        torch.manual_seed(3)
        to = torch.float64 if wide else dtype
        found.append(results(make_as(layer, to), x.to(to), mask.to(to), dy.to(to), oracle=oracle))
    exact, composed, got = found
    for name, value in exact.items():
        errors = [float((t[name].double() - value).square().mean().sqrt()) for t in (composed, got)]
        assert errors[1] <= 2 * errors[0] + float(value.abs().max()) * torch.finfo(dtype).eps, (name, errors)


def make_as(layer: TransformerLayer, dtype: torch.dtype) -> TransformerLayer:
    again = TransformerLayer(layer.layer_config, dtype=dtype)
    again.load_state_dict(layer.state_dict())
    return again


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pre", [True, False])
def test_what_is_made_again_has_the_bits_it_had(pre: bool, dtype: torch.dtype) -> None:
    def run(**options: bool) -> dict[str, Tensor]:
        layer = make(dtype, pre_layer_norm=pre, attn_dropout_ratio=0.3, hidden_dropout_ratio=0.2, **options)
        x, dy = (values(3, 17, 12, seed=k, dtype=dtype) for k in (1, 2))
        torch.manual_seed(3)
        return results(layer, x, mask_of("padding", 3, 3, 17, dtype), dy)

    plain = run()
    for option in ("gelu_checkpoint", "attn_dropout_checkpoint"):
        again = run(**{option: True})
        assert all(torch.equal(again[name], value) for name, value in plain.items()), option
    inverted = run(normalize_invertible=True)
    assert torch.equal(inverted["y"], plain["y"])
    eps = torch.finfo(dtype).eps
    for name, value in plain.items():  # y is rounded once more, and divided by weights of 0.4 and more
        assert float((inverted[name] - value).abs().max()) <= 40 * eps * float(value.abs().max()), name


@pytest.mark.dear
def test_dropout_is_the_same_in_forward_and_backward() -> None:
    """By finite differences: under one seed the layer is one function."""
    for pre in (True, False):
        layer = make(pre_layer_norm=pre, hidden_size=6, heads=2, attn_dropout_ratio=0.4, hidden_dropout_ratio=0.3)

        def run(x: Tensor, *parameters: Tensor, layer: TransformerLayer = layer) -> Tensor:
            torch.manual_seed(9)
            named = dict(zip((name for name, _ in layer.named_parameters()), parameters, strict=True))
            out: Tensor = torch.func.functional_call(layer, named, (x,))
            return out

        x = values(2, 3, 6, seed=1).requires_grad_()
        given = (x, *(p.detach().requires_grad_() for p in layer.parameters()))
        assert torch.autograd.gradcheck(run, given, fast_mode=True)  # along directions drawn at random


@pytest.mark.matrix
@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("frozen", [(), ("attn_qkvw", "norm_w"), ("attn_qkvw", "attn_qkvb", "norm_w", "norm_b")])
def test_an_input_without_gradient_and_a_second_backward(pre: bool, frozen: tuple[str, ...]) -> None:
    """The parameters' gradients are those they have when the input wants one, each time."""
    layer = make(pre_layer_norm=pre, attn_dropout_ratio=0.2, hidden_dropout_ratio=0.2)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    wanted = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    x, dy = values(2, 5, 12, seed=1), values(2, 5, 12, seed=2)
    torch.manual_seed(3)
    expected = results(layer, x, None, dy)
    torch.manual_seed(3)
    y = layer(x)
    for _ in range(2):
        grads = torch.autograd.grad(y, list(wanted.values()), dy, retain_graph=True)
        assert all(torch.equal(expected[name], grad) for name, grad in zip(wanted, grads, strict=True))


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("frozen", "of_input", "expected"), [(False, True, 8), (True, True, 4), (True, False, 3)])
@pytest.mark.parametrize("pre", [True, False])
def test_nobody_wants_a_gradient_and_no_product_makes_it(
    pre: bool, frozen: bool, of_input: bool, expected: int
) -> None:
    """Of the four matrices and the input; biases and normalisations are trained."""
    layer = make(torch.float32, pre_layer_norm=pre)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not frozen or (parameter.dim() == 1 and name not in ("norm_w", "norm_b")))
    y = layer(values(2, 5, 12, seed=1, dtype=torch.float32).requires_grad_(of_input))
    with Products() as products:
        y.sum().backward()
    assert products.count == expected


@pytest.mark.dear
def test_the_share_that_is_dropped() -> None:
    """Of n independent elements p are dropped, to 5·√(p(1 - p)/n): five deviations of a binomial."""
    p, size, tokens, batch = 0.2, 64, 64, 16
    config = {"hidden_size": size, "heads": 1, "intermediate_size": 1}

    def zeroed(**ratios: float) -> TransformerLayer:
        layer = TransformerLayer(TransformerLayerConfig(**config, **ratios))
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        return layer

    def check(kept: Tensor) -> None:
        assert abs(float(kept.double().mean()) - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / kept.numel())

    x = torch.zeros(batch, tokens, size)
    for bias in ("attn_ob", "output_b"):
        layer = zeroed(attn_dropout_ratio=0.0, hidden_dropout_ratio=p)
        torch.nn.init.ones_(getattr(layer, bias))
        y = layer(x)
        assert set(y.unique().tolist()) == {0.0, y.max().item()}
        torch.testing.assert_close(y.max().item(), 1 / (1 - p))
        check(y != 0)
        assert not torch.equal(layer(x), y)
        assert torch.equal(layer.eval()(x), torch.ones_like(x))
    layer = zeroed(attn_dropout_ratio=p, hidden_dropout_ratio=0.0)
    torch.nn.init.ones_(layer.attn_qkvb)
    torch.nn.init.eye_(layer.attn_ow)
    counts = (layer(x).detach()[..., 0] * tokens * (1 - p)).round()  # of T keys of one probability
    assert len(counts.unique()) > 5
    assert abs(float(counts.double().mean()) / tokens - (1 - p)) <= 5 * math.sqrt(
        p * (1 - p) / (counts.numel() * tokens)
    )


def test_calls_and_seeds_drop_others_and_torchs_seed_repeats_them() -> None:
    ratios = {"attn_dropout_ratio": 0.5, "hidden_dropout_ratio": 0.5}
    layer, other = make(torch.float32, **ratios), make(torch.float32, seed=6, **ratios)
    x = values(2, 5, 12, seed=1, dtype=torch.float32)

    def run(which: TransformerLayer) -> Tensor:
        out: Tensor = which(x)
        return out

    torch.manual_seed(0)
    first, second = run(layer), run(layer)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(run(layer), first)
    torch.manual_seed(0)
    assert not torch.equal(run(other), first)
    torch.manual_seed(0)
    assert torch.equal(run(layer), first)


def test_evaluation_and_no_dropout_take_no_random_numbers() -> None:
    x = values(2, 5, 12, seed=1, dtype=torch.float32)
    dropping = make(torch.float32, attn_dropout_ratio=0.5).eval()
    plain = make(torch.float32)
    before = next_offset()
    assert torch.equal(dropping(x), plain(x))
    assert next_offset() == before
    with torch.inference_mode():
        assert torch.equal(dropping(x), plain(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_drops_the_same_again(reentrant: bool) -> None:
    layers = torch.nn.ModuleList(
        make(torch.float32, k, attn_dropout_ratio=0.3, hidden_dropout_ratio=0.2) for k in (0, 1)
    )

    def run(again: bool) -> list[Tensor]:
        torch.manual_seed(4)
        x = values(2, 5, 12, seed=1, dtype=torch.float32).requires_grad_()
        y: Tensor = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=reentrant) if again else layer(y)
        return list(torch.autograd.grad(y.square().sum(), [*layers.parameters()])) if not reentrant else backward(y)

    def backward(y: Tensor) -> list[Tensor]:
        layers.zero_grad()
        y.square().sum().backward()
        return [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]

    plain, again = run(False), run(True)
    assert len(plain) == len(again) == 24
    assert all(map(torch.equal, plain, again))


def test_autocast_and_compute_dtype_cast_what_comes() -> None:
    """Gradients come in the dtype of what they are of; the numbers are those of a layer in bf16."""
    full = make(torch.float32)
    low = make(torch.bfloat16)
    told = TransformerLayer(TransformerLayerConfig(**{**vars(full.layer_config), "compute_dtype": torch.bfloat16}))
    told.load_state_dict(full.state_dict())
    x, dy = (values(2, 5, 12, seed=k, dtype=torch.float32) for k in (1, 2))
    expected = results(low, x.bfloat16(), None, dy.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        cast = results(full, x, None, dy.bfloat16())
    for got in (cast, results(told, x, None, dy.bfloat16())):
        assert got["y"].dtype is torch.bfloat16
        assert all(value.dtype is torch.float32 for name, value in got.items() if name != "y")
        for name, value in expected.items():  # the kernels take biases and norms as they are: not rounded to bf16
            assert float((got[name].float() - value.float()).abs().max()) <= 2**-4 * float(value.abs().max()), name


@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_nothing_gives_nothing(batch: int, tokens: int) -> None:
    layer = make(torch.float32, attn_dropout_ratio=0.1)
    x = torch.zeros(batch, tokens, 12, requires_grad=True)
    y = layer(x, torch.zeros(batch, 1, 1, tokens))
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert float(layer.attn_qkvw.grad.abs().sum()) == 0


def test_initial_values() -> None:
    torch.manual_seed(0)
    config = TransformerLayerConfig(hidden_size=256, heads=4, num_hidden_layers=8, initializer_range=0.02)
    for adjust, expected in ((True, 0.005), (False, 0.02)):
        layer = TransformerLayer(TransformerLayerConfig(**{**vars(config), "adjust_init_range": adjust}))
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 1:
                assert bool((parameter == (1.0 if name in ("attn_nw", "norm_w") else 0.0)).all()), name
                continue
            std = expected if name in ("attn_ow", "output_w") else 0.02
            # five deviations of the deviation of n normal numbers
            assert abs(float(parameter.detach().std()) / std - 1) < 5 / math.sqrt(2 * parameter.numel()), name


def test_initial_weights_and_biases_are_taken_in_their_order_and_copied() -> None:
    shapes = [(4, 4)] * 4 + [(4,), (6, 4), (4, 6), (4,)]
    biases = [(4,)] * 5 + [(6,), (4,), (4,)]
    given_weights = [torch.full(shape, float(k)) for k, shape in enumerate(shapes)]
    given_biases = [torch.full(shape, 10.0 + k) for k, shape in enumerate(biases)]
    config = TransformerLayerConfig(hidden_size=4, heads=2, intermediate_size=6)
    layer = TransformerLayer(config, given_weights, given_biases)
    assert layer.attn_qkvw[:, 0].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert layer.attn_qkvb.tolist() == [10.0] * 4 + [11.0] * 4 + [12.0] * 4
    names = ("attn_o", "attn_n", "inter_", "output_", "norm_")
    assert [getattr(layer, f"{n}w").flatten()[0].item() for n in names] == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert [getattr(layer, f"{n}b").flatten()[0].item() for n in names] == [13.0, 14.0, 15.0, 16.0, 17.0]
    given_weights[3].fill_(99.0)
    assert layer.attn_ow[0, 0].item() == 3.0
    with pytest.raises(ValueError, match="initial_weights has 7 tensors; it must have 8: query, key, value"):
        TransformerLayer(config, given_weights[:7])
    given_biases[5] = torch.zeros(5)
    with pytest.raises(
        ValueError, match=r"initial_biases\[5\], of the intermediate, has shape \(5,\); it must be \(6,\)"
    ):
        TransformerLayer(config, None, given_biases)


@pytest.mark.parametrize("pre", [True, False])
def test_hugging_faces_bert_layer(pre: bool) -> None:
    """Its weights and biases as initial values give its outputs and its gradient (post-norm)."""
    transformers = pytest.importorskip("transformers")
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    config = transformers.BertConfig(hidden_size=24, num_attention_heads=3, intermediate_size=40)
    torch.manual_seed(0)
    peer = bert.BertLayer(config).eval()
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    attention, out = peer.attention, peer.output
    parts = [
        attention.self.query, attention.self.key, attention.self.value, attention.output.dense,
        attention.output.LayerNorm, peer.intermediate.dense, out.dense, out.LayerNorm,
    ]  # fmt: skip
    layer = TransformerLayer(
        TransformerLayerConfig(hidden_size=24, heads=3, intermediate_size=40, pre_layer_norm=pre),
        [part.weight for part in parts], [part.bias for part in parts],
    ).eval()  # fmt: skip
    x, y = values(2, 9, 24, seed=1, dtype=torch.float32), values(2, 9, 24, seed=2, dtype=torch.float32)
    mask = torch.where(torch.arange(9) < 6, 0.0, -10000.0).expand(2, 1, 1, 9)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    theirs = peer(xs[0], attention_mask=mask)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    ours = layer(xs[1], mask)
    if pre:
        assert not torch.allclose(ours, theirs, atol=1e-2)
        return
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for value, found in ((theirs, xs[0]), (ours, xs[1])):
        value.backward(y)
        assert found.grad is not None
    torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=1e-4, atol=1e-4)


def test_wrong_inputs_are_told_with_the_numbers() -> None:
    layer = make(torch.float32)
    x = torch.zeros(2, 5, 12)
    for bad, mask, message in (
        (torch.zeros(5, 12), None, r"hidden_states have shape \(5, 12\); it must be \(sequences, tokens, 12\)"),
        (torch.zeros(2, 5, 11), None, r"shape \(2, 5, 11\)"),
        (x.double(), None, "hidden_states are torch.float64 and the parameters torch.float32"),
        (x, torch.zeros(2, 5), r"attention_mask is torch.float32 of shape \(2, 5\).*broadcast to \(2, 3, 5, 5\)"),
        (x, torch.ones(2, 1, 1, 5, dtype=torch.bool), "attention_mask is torch.bool"),
        (x, torch.zeros(3, 1, 1, 5), r"shape \(3, 1, 1, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(bad, mask)
    with pytest.raises(NotImplementedError, match="attention_mask requires a gradient"):
        layer(x, torch.zeros(2, 1, 1, 5, requires_grad=True))
    inverting = make(torch.float32, normalize_invertible=True)
    torch.nn.init.zeros_(inverting.norm_w)
    with pytest.raises(ValueError, match="normalize_invertible divides by norm_w, which has 12 zeros"):
        inverting(x)
    with torch.no_grad():
        inverting(x)


def test_wrong_configurations_are_told_with_the_numbers() -> None:
    good = {"hidden_size": 12, "heads": 3}
    for bad, message in (
        ({"heads": 5}, "hidden_size is 12 and heads 5; hidden_size must be a multiple of heads"),
        ({"heads": 0}, "heads is 0; it must be a whole number of at least 1"),
        ({"hidden_size": 12.0}, "hidden_size is 12.0"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"attn_dropout_ratio": 1.5}, "attn_dropout_ratio is 1.5; it must be between 0 and 1"),
        ({"hidden_dropout_ratio": -1}, "hidden_dropout_ratio is -1"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan; it must be a number, not negative"),
        ({"initializer_range": -0.1}, "initializer_range is -0.1"),
        ({"gelu": "quick"}, "gelu is 'quick'; it must be 'none' or 'tanh'"),
        ({"seed": -1}, "seed is -1"),
        ({"gelu_checkpoint": 1}, "gelu_checkpoint is 1; it must be True or False"),
        ({"compute_dtype": torch.int8}, "compute_dtype is torch.int8; it must be one of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformerLayerConfig(**{**good, **bad})
    with pytest.raises(ValueError, match=r"config is a dict; it must be a zoo\.nn\.TransformerLayerConfig"):
        TransformerLayer(good)  # type: ignore[arg-type]


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_it_returns_is_written_to_in_place_as_any_layers_is(pre: bool, frozen: bool) -> None:
    layer = make(pre_layer_norm=pre).requires_grad_(not frozen)
    found = []
    for write in (lambda y: y.mul_(3).add_(1), lambda y: y * 3 + 1):
        x = values(2, 5, 12, seed=1).requires_grad_()
        write(layer(x)).square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)
    with torch.no_grad():
        y = layer(values(2, 5, 12, seed=1))
    assert not y._is_view()


@pytest.mark.parametrize("pre", [False, True])
def test_on_meta_there_are_shapes_and_dtypes(pre: bool) -> None:
    layer = make(torch.float32, pre_layer_norm=pre).to("meta")
    x = torch.zeros(2, 5, 12, device="meta", requires_grad=True)
    y = layer(x)
    assert (y.shape, y.dtype, y.device.type) == ((2, 5, 12), torch.float32, "meta")
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    with torch.no_grad():
        assert layer.eval()(x).is_meta


def test_transforms_of_functions_are_refused_by_name() -> None:
    layer, x = make(), values(2, 5, 12, seed=1)
    for transform in (lambda: torch.func.grad(lambda t: layer(t).sum())(x), lambda: torch.vmap(layer)(x[None])):
        with pytest.raises(NotImplementedError, match=r"a transform of torch\.func .* over a TransformerLayer"):
            transform()

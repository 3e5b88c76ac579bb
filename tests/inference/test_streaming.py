"""Layers on disk: the same bits within the budget, whatever the order, and nothing is lost."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_model
from tests.inference.test_generation import some_prompts
from tests.inject.models import model_of
from tests.profiles import examples
from torch import nn

pytest.importorskip("transformers")

from zoo import sim
from zoo.checkpointing.foreign import load_safetensors
from zoo.inference import Streamed, generate, stream
from zoo.inject import inject
from zoo.io import ChecksumError, TransferError
from zoo.nn import pack_linears
from zoo.tensor import load
from zoo.zero import ZeroOptimizer

SHAPE: dict[str, Any] = {"num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LAYERS: dict[int, int] = {16: 126_976, 8: 40_960, 4: 24_576}
"""Bytes of a layer of Qwen 2, by bits."""


def made(bits: int = 16, injected: bool = False, family: str = "Qwen2") -> Any:
    model = model_of(family, **SHAPE)
    if bits < 16:
        pack_linears(model, bits=bits, group_size=16)
    if injected:
        inject(model)
    return model


@pytest.mark.dear
@examples(times=1)
@given(
    bits=st.sampled_from([16, 8, 4]), injected=st.booleans(), kept=st.integers(0, 5), ahead=st.integers(1, 3),
    family=st.sampled_from(["Qwen2", "Phi3", "GPTNeoX"]),
)  # fmt: skip
def test_it_generates_the_same_tokens_within_the_budget(
    bits: int, injected: bool, kept: int, ahead: int, family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("layers")
    model, prompts = made(bits, injected and family != "GPTNeoX", family), some_prompts([5, 2, 7])
    with torch.no_grad():
        right, logits = generate(model, prompts, max_new_tokens=4), model(prompts[0][None], use_cache=False).logits
    before = {name: value.clone() for name, value in model.state_dict().items()}
    size = _largest(model, folder)
    budget = (ahead + kept) * size if kept < 5 else 5 * size
    done = stream(model, folder, budget_bytes=budget, ahead=ahead)
    assert done.num_bytes <= budget
    assert len(done.pinned) == (kept if ahead + kept < 5 else 5)
    assert len(done.pinned) + len(done.streamed) == 5
    with torch.no_grad():
        found, again = generate(model, prompts, max_new_tokens=4), model(prompts[0][None], use_cache=False).logits
    assert torch.equal(again, logits)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    forwards = 3 + 3 + 1  # prompts, steps of all rows, the logits
    assert forwards * len(done.streamed) * size <= done.bytes_read <= (forwards * len(done.streamed) + ahead) * size
    done.close()
    assert not list(folder.iterdir())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(prompts[0][None], use_cache=False).logits, logits)


def _largest(model: nn.Module, folder: Path) -> int:
    """Bytes of a layer's file: what a budget of one byte less than a buffer says."""
    with pytest.raises(ValueError, match="1 buffers of the largest layer take") as told:
        stream(model, folder, budget_bytes=1, ahead=1)
    return int(str(told.value).split(" take ")[1].split(";")[0])


def test_bytes_of_a_layer() -> None:
    for bits, size in LAYERS.items():
        model = made(bits)
        layer = model.model.layers[0]
        tensors = [*layer.parameters(), *layer.buffers()]
        assert sum(t.nbytes for t in tensors) <= size <= sum(t.nbytes + 64 for t in tensors) + 4096
        assert _largest(model, Path("/nowhere")) == size


def test_another_order_and_an_interrupted_forward(tmp_path: Path) -> None:
    model = made()
    plain = copy.deepcopy(model)
    stream(model, tmp_path, budget_bytes=2 * LAYERS[16])
    layers, right = model.model.layers, plain.model.layers
    x = torch.randn(1, 3, 64)
    angles = plain.model.rotary_emb(x, torch.arange(3)[None])
    with torch.no_grad():
        for index in (4, 2, 2, 0, 3, 1, 4):
            one, other = (of[index](x, position_embeddings=angles) for of in (layers, right))
            assert torch.equal(one, other)
        layers[3].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.tensor([[5]]))
        assert bool(layers[3].mlp.up_proj.weight.isnan().all())
        layers[3].mlp._forward_pre_hooks.clear()
        assert torch.equal(model(torch.tensor([[5]])).logits, plain(torch.tensor([[5]])).logits)


def test_what_would_write_to_weights_on_disk_is_refused_before_anything_changed(tmp_path: Path) -> None:
    model = made()
    plain = copy.deepcopy(model)
    done = stream(model, tmp_path, budget_bytes=2 * LAYERS[16])
    (tmp_path / "other").mkdir()
    save_model(plain, tmp_path / "other" / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.layers.0.*no memory of its own.*zoo.inference.stream.*Nothing was"):
        load(model, load_safetensors(tmp_path / "other"))
    left = pack_linears(model, group_size=16)
    assert "zoo.inference.stream" in left["model.layers.0.mlp.up_proj"]
    done.close()
    for name, p in plain.model.layers.named_parameters():
        assert torch.equal(model.model.layers.get_parameter(name), p)


def test_from_meta_no_more_is_there_than_the_budget(tmp_path: Path) -> None:
    plain = made()
    values = {name: p.detach().clone() for name, p in plain.named_parameters()}
    alive: list[str] = []
    model = copy.deepcopy(plain)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    values["model.embed_tokens.weight"] = values["lm_head.weight"] = plain.lm_head.weight.detach()
    plain.model.embed_tokens.weight = plain.lm_head.weight

    def weights(name: str) -> torch.Tensor:
        alive.append(name)
        there = [p for p in model.model.layers.parameters() if not p.is_meta and 0 not in p.stride()]
        assert sum(p.nbytes for p in there) <= 2 * LAYERS[16]  # one that stays, and the one that is filled
        return values[name]

    done = stream(model, tmp_path, budget_bytes=3 * LAYERS[16], weights=weights)
    assert len(done.pinned) == 1
    assert len(alive) == len(set(alive)) == len(list(plain.named_parameters()))
    prompts = some_prompts([4, 6])
    found = generate(model, prompts, max_new_tokens=3)
    assert all(torch.equal(a, b) for a, b in zip(found, generate(plain, prompts, max_new_tokens=3), strict=True))


def test_layers_that_stay_are_spread(tmp_path: Path) -> None:
    model = made()
    done = stream(model, tmp_path, budget_bytes=4 * LAYERS[16])
    assert done.pinned == ("model.layers.2", "model.layers.4")
    assert done.streamed == ("model.layers.0", "model.layers.1", "model.layers.3")
    done.close()
    done = stream(model, tmp_path, budget_bytes=5 * LAYERS[16])
    assert len(done.pinned) == 5  # all of it fits
    assert done.num_bytes == 5 * LAYERS[16]


def test_weights_of_several_layers_stay(tmp_path: Path) -> None:
    model = made()
    layers = model.model.layers
    layers[4].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    plain = copy.deepcopy(model)
    stream(model, tmp_path, budget_bytes=3 * LAYERS[16])
    assert not bool(layers[4].mlp.up_proj.weight.isnan().any())
    prompts = some_prompts([4])
    assert torch.equal(generate(model, prompts, max_new_tokens=3)[0], generate(plain, prompts, max_new_tokens=3)[0])


def test_a_copy_is_refused_and_another_stream_too(tmp_path: Path) -> None:
    """A copy had no weights, and gave other tokens."""
    model, prompts = made(), some_prompts([4])
    right = generate(model, prompts, max_new_tokens=3)[0]
    done = stream(model, tmp_path, budget_bytes=3 * LAYERS[16])
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match=r"on disk .*; close\(\) comes before a copy of it"):
            copied(model)
    with pytest.raises(ValueError, match=r"model\.layers\.0 is streamed .*; close\(\) comes before another one"):
        stream(model, tmp_path, budget_bytes=3 * LAYERS[16])
    with pytest.raises(ValueError, match="it cannot be copied"):
        inject(model)
    assert torch.equal(generate(model, prompts, max_new_tokens=3)[0], right)
    done.close()
    assert torch.equal(generate(copy.deepcopy(model), prompts, max_new_tokens=3)[0], right)


@pytest.mark.parametrize("injected", [False, True])
def test_what_is_converted_meanwhile_is_told_and_converted_by_close(injected: bool, tmp_path: Path) -> None:
    model, prompts = made(injected=injected), some_prompts([4])
    done = stream(model, tmp_path, budget_bytes=3 * LAYERS[16])
    layer = model.model.layers[0]
    assert done.streamed[0] == "model.layers.0"
    layer.mlp.down_proj.weight = nn.Parameter(torch.ones(64, 96), requires_grad=False)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"weight of model\.layers\.0 was replaced or converted"):
            generate(model, prompts, max_new_tokens=3)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"model\.layers\.0 was replaced or converted"):
        generate(model, prompts, max_new_tokens=3)
    done.close()
    right = made().to(torch.bfloat16)
    right.model.layers[0].mlp.down_proj.weight = nn.Parameter(torch.ones(64, 96).bfloat16())
    assert all(torch.equal(value, right.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.dear
def test_threads_take_turns(tmp_path: Path) -> None:
    model, prompts = made(), some_prompts([5, 2, 7])
    right = generate(model, prompts, max_new_tokens=4)
    stream(model, tmp_path, budget_bytes=3 * LAYERS[16])
    found: list[bool] = []

    def work() -> None:
        for _ in range(3):
            mine = generate(model, prompts, max_new_tokens=4)
            found.append(all(torch.equal(one, other) for one, other in zip(mine, right, strict=True)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [True] * 12


def test_after_a_failure_in_one_thread_another_goes_on(tmp_path: Path) -> None:
    model, prompts = made(), some_prompts([4])
    right = generate(model, prompts, max_new_tokens=3)[0]
    stream(model, tmp_path, budget_bytes=2 * LAYERS[16])
    hooks = [
        model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0, prepend=True),
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0),
    ]
    for hook in reversed(hooks):
        with pytest.raises(ZeroDivisionError):
            generate(model, prompts, max_new_tokens=3)
        hook.remove()
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(generate(model, prompts, max_new_tokens=3)))
    thread.start()
    thread.join(120)
    assert torch.equal(found[0], right)


@pytest.mark.parametrize("damage", ["a bit", "cut", "gone"])
def test_a_file_that_is_damaged_stays_one_that_is_told(damage: str, tmp_path: Path) -> None:
    """A model that could not be closed gave other tokens; one whose file was cut had no buffers left."""
    model, prompts = made(), some_prompts([4])
    right = generate(model, prompts, max_new_tokens=3)[0]
    done = stream(model, tmp_path, budget_bytes=2 * LAYERS[16])
    (file,) = tmp_path.glob("*/3.bin")
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:77] + (b"" if damage == "cut" else bytes([content[77] ^ 1]) + content[78:]))
    for call in (lambda: generate(model, prompts, max_new_tokens=3), done.close) * 2:
        with pytest.raises(ChecksumError if damage == "a bit" else TransferError, match=r"3\.bin"):
            call()
    assert done.streamed == ("model.layers.3", "model.layers.4")
    file.write_bytes(content)
    assert torch.equal(generate(model, prompts, max_new_tokens=3)[0], right)
    done.close()
    assert torch.equal(generate(model, prompts, max_new_tokens=3)[0], right)
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stream got a str; give it a model"):
        stream("gpt2", tmp_path, budget_bytes=1)  # type: ignore[arg-type]
    model = made()
    with pytest.raises(ValueError, match="2 buffers of the largest layer take 253952; give more"):
        stream(model, tmp_path, budget_bytes=200_000)
    with pytest.raises(ValueError, match="budget_bytes=0; it must be a whole number"):
        stream(model, tmp_path, budget_bytes=0)
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        stream(model.train(), tmp_path, budget_bytes=10**6)
    model.eval()
    meta = copy.deepcopy(model).to("meta")
    with pytest.raises(ValueError, match=r"the buffer model\.rotary_emb.inv_freq is on meta"):
        stream(meta, tmp_path, budget_bytes=10**6)
    meta.model.rotary_emb = model.model.rotary_emb
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is on meta, and weights is None"):
        stream(meta, tmp_path, budget_bytes=10**6)
    with pytest.raises(ValueError, match=r"has shape \(97, 64\), and weights give \(3,\)"):
        stream(meta, tmp_path, budget_bytes=10**6, weights=lambda name: torch.zeros(3))
    assert not list(tmp_path.iterdir())
    done = stream(model, tmp_path, budget_bytes=3 * LAYERS[16])
    assert isinstance(done, Streamed)
    with pytest.raises(ValueError, match=r"the weights of model\.layers\.0 are on disk .*; close\(\) brings them back"):
        model.state_dict()
    (file,) = [path for path in next(tmp_path.iterdir()).iterdir() if path.name == "3.bin"]
    content = bytearray(file.read_bytes())
    content[77] ^= 1
    file.write_bytes(bytes(content))
    prompt = some_prompts([4])
    with pytest.raises(ChecksumError, match=r"3\.bin"):
        generate(model, prompt, max_new_tokens=3, end=[])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_has_an_optimizer_is_not_streamed(stage: int, tmp_path: Path) -> None:
    """Its layers lie in one buffer, so that none of them would leave memory."""

    def fn(rank: int) -> None:
        model = model_of("Llama")
        optimizer = ZeroOptimizer(model, stage=stage, lr=1e-2)
        with pytest.raises(ValueError, match="is one that an engine or optimizer of zoo has"):
            stream(model.eval(), tmp_path, budget_bytes=70_000)
        optimizer.close()

    sim.run(2, fn)
    assert not list(tmp_path.iterdir())

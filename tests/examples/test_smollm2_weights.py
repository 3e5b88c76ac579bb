"""SmolLM2's real weights, where the package that contains them is installed (see docs/dependencies.md)."""

from __future__ import annotations

from collections import Counter
from math import log
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.smollm2 import needs_weights

from zoo.examples.smollm2 import Llama, SmolLM2Task, generate

pytestmark = [pytest.mark.slow, needs_weights]


@pytest.fixture(scope="module")
def task() -> SmolLM2Task:
    return SmolLM2Task(SmolLM2Task.Config(num_validation_windows=4), seed=0)


@pytest.fixture(scope="module")
def model(task: SmolLM2Task) -> Llama:
    model = task.model().eval().requires_grad_(False)
    assert isinstance(model, Llama)
    return model


def test_size(model: Llama) -> None:
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    size = model.config
    assert (size.layers, size.width, size.heads, size.key_value_heads, size.mlp_width) == (30, 576, 9, 3, 1536)
    assert (size.vocabulary, size.context, size.rope_theta, size.norm_eps, size.tied) == (49152, 8192, 1e5, 1e-5, True)


def test_tokens(task: SmolLM2Task) -> None:
    assert task.tokenizer.encode("Hello world").ids == [19556, 905]
    for text in task.text.pieces[1]:
        assert task.tokenizer.decode(task.tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_it_knows_english(task: SmolLM2Task, model: Llama) -> None:
    tokens = task.tokenizer.encode("The capital of France is").ids
    assert task.tokenizer.decode(generate(model, tokens, 1, context=256)) == "The capital of France is Paris"
    text = (
        "The sun rises in the east and sets in the west. In the morning the birds begin to sing, and people go to "
        "work. When it rains, they take an umbrella, and in the winter they wear a warm coat."
    )
    ids = torch.tensor([task.tokenizer.encode(text).ids])
    assert float(model(ids[:, :-1], ids[:, 1:])) < 2.8  # 10.8 for each token alike


def test_it_is_far_below_the_frequencies_of_tokens(task: SmolLM2Task) -> None:
    train = task.training_data()
    counts = Counter(int(token) for i in range(len(train)) for token in train[i][1])  # type: ignore[arg-type]
    total = sum(counts.values()) + 49152
    data = task.validation_data()
    held = [int(token) for i in range(len(data)) for token in data[i][1]]  # type: ignore[arg-type]
    unigram = -sum(log((counts[token] + 1) / total) for token in held) / len(held)
    name, loss = task.baseline()
    assert name == "the pretrained model"
    assert loss < 3.5 < unigram - 2


def test_transformers_computes_the_same_from_an_exported_folder(
    task: SmolLM2Task, model: Llama, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    weights = {name: value.detach() for name, value in model.named_parameters()}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    task.export(tmp_path)
    peer, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert peer.dtype == torch.float32
    assert set(peer.state_dict()) == set(model.state_dict())
    x = task.validation_data()[1][0][None]
    with torch.no_grad():
        ours, theirs = model(x), peer.eval()(x).logits
    assert float((ours - theirs).abs().max()) < 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Hello world, 123 is 3.5 % of\n\n  it's <|im_end|> café"
    assert tokenizer(text)["input_ids"] == task.tokenizer.encode(text).ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")

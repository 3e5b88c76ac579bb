"""A cache in files gives what one in memory gives, in two layers' memory, and tells of a disk that fails."""

from __future__ import annotations

import copy
import errno
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.inject.models import model_of, prompts
from tests.profiles import examples

pytest.importorskip("transformers")
from transformers import DynamicCache, LlamaConfig

from zoo.inference import Cache, cache_files, forecast
from zoo.inject import inject
from zoo.io import TransferError

FAMILIES: dict[str, dict[str, Any]] = {"Llama": {}, "Mistral": {"sliding_window": 4}, "Qwen3": {}, "GPTNeoX": {}}


@pytest.mark.matrix
@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_takes_it(family: str, injected: bool, tmp_path: Path) -> None:
    model = model_of(family, **FAMILIES[family])
    if injected and family != "GPTNeoX":
        inject(model)
    for side in (None, "left"):
        for beams in (1, 3):
            options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
            cache = Cache(model.config, 7 + 12, folder=tmp_path)
            found = model.generate(**prompts(side), cache=cache, **options)
            assert torch.equal(found, model.generate(**prompts(side), **options))
            assert cache.num_bytes == forecast(model, rows=3 * beams, room=7 + 12, nvme=True)
            files = list(tmp_path.glob("*/*.bin"))
            assert sum(file.stat().st_size for file in files) >= cache.file_bytes
            assert (cache.file_bytes > 0) is (family != "Mistral")
    del cache
    gc.collect()
    assert not list(tmp_path.iterdir())


@examples(times=0.3, quick=1)
@given(
    layers=st.integers(1, 4), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=8), data=st.data(),
    dtype=st.sampled_from([None, torch.bfloat16]),
)  # fmt: skip
def test_it_has_what_a_growing_cache_has(
    tmp_path_factory: pytest.TempPathFactory, layers: int, cuts: list[int], data: st.DataObject,
    dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """In the order of the layers or not, with rows that change, tokens that go, and what is read beside."""
    config, rows = LlamaConfig(num_hidden_layers=layers), 2
    cache = Cache(config, 40, folder=tmp_path_factory.mktemp("cache"), dtype=dtype)
    right = DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)
    for new in cuts:
        for layer in data.draw(st.permutations(range(layers))):
            k, v = (torch.randn(rows, 3, new, 4, generator=generator).bfloat16().float() for _ in range(2))
            for one, other in zip(cache.update(k, v, layer), right.update(k, v, layer), strict=True):
                assert torch.equal(one, other)
        what = data.draw(st.sampled_from(["nothing", "crop", "select", "repeat", "read"]))
        if what == "crop":
            cache.crop(-1)
            right.crop(-1)
        if what == "select":
            chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3)))
            cache.batch_select_indices(chosen)
            right.batch_select_indices(chosen)
            rows = len(chosen)
        if what == "repeat" and rows < 5:
            cache.batch_repeat_interleave(2)
            right.batch_repeat_interleave(2)
            rows *= 2
        if what == "read":
            for one, other in zip(cache.layers, right.layers, strict=True):
                assert torch.equal(one.keys, other.keys)
                assert torch.equal(one.values, other.values)


def test_memory_is_two_layers_whatever_their_number(tmp_path: Path) -> None:
    sizes = set()
    for layers in (2, 3, 8):
        cache = Cache(LlamaConfig(num_hidden_layers=layers), 16, folder=tmp_path)
        for _ in range(3):
            for layer in range(layers):
                cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), layer)
        sizes.add(cache.num_bytes)
        assert cache.file_bytes == layers * 16 * 2 * 2 * 4 * 4
    assert sizes == {2 * 16 * 2 * 2 * 4 * 4}


def test_a_copy_has_files_of_its_own(tmp_path: Path) -> None:
    def token(cache: Any, value: float) -> None:
        for layer in range(3):
            cache.update(torch.full((1, 2, 1, 4), value), torch.full((1, 2, 1, 4), -value), layer)

    cache: Any = Cache(LlamaConfig(num_hidden_layers=3), 8, folder=tmp_path)
    token(cache, 1.0)
    begun = copy.deepcopy(cache)  # a beginning that several prompts share
    token(begun, 2.0)
    token(cache, 3.0)
    for one, last in ((cache, 3.0), (begun, 2.0)):
        for layer in one.layers:
            assert layer.keys[0, 0, :, 0].tolist() == [1.0, last]
            assert layer.values[0, 0, :, 0].tolist() == [-1.0, -last]
    assert len(list(tmp_path.iterdir())) == 2
    del begun, one, layer
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    token(cache, 4.0)
    assert cache.layers[2].keys[0, 0, :, 0].tolist() == [1.0, 3.0, 4.0]


def test_what_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=1)
    with pytest.raises(ValueError, match="and a folder: keys and values are kept in one of them"):
        Cache(config, 4, folder=tmp_path, device="cpu")
    with pytest.raises(OSError, match="nowhere"):
        Cache(config, 4, folder=tmp_path / "nowhere")
    cache = Cache(config, 4, folder=tmp_path)
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    with pytest.raises(ValueError, match="room for 4 tokens a row; 3 are in it and 2 come"):
        cache.update(torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4), 0)
    with pytest.raises(ValueError, match="has 1 rows and 2 come"):
        cache.update(torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4), 0)


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = Cache(LlamaConfig(num_hidden_layers=1), 8, folder=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(cache_files.os, "posix_fallocate", full)
        with pytest.raises(OSError, match="takes 512 bytes for 8 tokens of 1 rows; there is no room"):
            cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert cache.get_seq_length() == 0
    assert torch.equal(cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)[0], torch.ones(1, 2, 1, 4))


class _Failed:
    """A write of which the disk says at its end that it took nothing."""

    def wait(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_could_not_be_read_ahead_is_read_later(tmp_path: Path) -> None:
    """The buffer that was meant for it has another layer's numbers."""
    cache: Any = Cache(LlamaConfig(num_hidden_layers=4), 8, folder=tmp_path)
    for layer in (0, 1, 2, 3):
        cache.update(*[torch.full((1, 2, 1, 4), float(layer))] * 2, layer)
    cache.layers[3].keys  # noqa: B018 - waits until all is written
    (file,) = tmp_path.glob("*/1.bin")
    away = file.rename(tmp_path / "away")
    with pytest.raises(TransferError, match=r"1\.bin"):
        cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0)
    away.rename(file)
    assert cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 1)[0].eq(1).all()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_after_a_write_that_fails_nothing_goes_on(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    one = torch.ones(1, 2, 1, 4)
    cache: Any = Cache(LlamaConfig(num_hidden_layers=layers), 8, folder=tmp_path)

    def token() -> None:
        for layer in range(layers):
            cache.update(one, one, layer)

    token()
    with monkeypatch.context() as patched:
        patched.setattr(type(cache.layers[0].files.handle), "async_pwrite", lambda *_: _Failed())
        cache.update(2 * one, one, 0)
    with pytest.raises(OSError, match="Input/output error"):
        [cache.update(one, one, layer) for layer in (*range(1, layers), 0)]  # at the latest when it is read again
    with pytest.raises(ValueError, match=r"were not written to its file .*: reset\(\) it first"):
        cache.update(one, one, 0)
    cache.reset()
    token()
    token()
    for layer in cache.layers:
        assert torch.equal(layer.keys, torch.ones(1, 2, 2, 4))

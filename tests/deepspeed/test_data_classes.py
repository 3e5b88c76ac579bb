"""What programs make and read of parts that are not there: settings, shapes of ranks, small readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from zoo.deepspeed.autotuning.utils import get_val_by_key, set_val_by_key
from zoo.deepspeed.checkpoint import get_model_3d_descriptor, model_3d_desc, reshape_meg_2d_parallel
from zoo.deepspeed.compile.config import CompileConfig
from zoo.deepspeed.inference import config as inference
from zoo.deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from zoo.deepspeed.runtime.rollout import RolloutBatch, RolloutEngine, RolloutRequest, SamplingConfig

from zoo.deepspeed import linear

# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_layers_and_profilers() -> None:
    lora, bits = linear.LoRAConfig(lora_r=8), linear.QuantizationConfig(q_bits=6)
    assert (lora.lora_r, lora.lora_alpha, len(lora.target_mods), lora.target_mods[0]) == (8, 16.0, 7, "q_proj")
    assert linear.LoRAConfig().target_mods is not lora.target_mods
    assert (bits.q_bits, bits.group_size, bits.q_dtype) == (6, 512, torch.uint8)
    profiler = DeepSpeedFlopsProfilerConfig({"flops_profiler": {"enabled": True, "profile_step": 3}})
    assert (profiler.enabled, profiler.profile_step, profiler.module_depth, profiler.detailed) == (True, 3, -1, True)
    assert DeepSpeedFlopsProfilerConfig({}).enabled is False
    assert CompileConfig(passes=["z3"]).free_activation_threshold == 10 * 2**20
    with pytest.raises(ValidationError):
        CompileConfig(passes=["z4"])


def test_settings_of_inference() -> None:
    made = inference.DeepSpeedInferenceConfig(kernel_inject=True, dtype="bfloat16", tp={"tp_size": 2}, max_tokens=7)
    assert made.replace_with_kernel_inject
    assert (made.dtype, made.tensor_parallel.tp_size, made.max_out_tokens) == (torch.bfloat16, 2, 7)
    assert isinstance(made.quant, inference.QuantizationConfig)
    assert inference.DtypeEnum("half") is inference.DtypeEnum(torch.float16) is inference.DtypeEnum.fp16
    for enabled in (True, False):
        assert inference.DeepSpeedInferenceConfig(moe=enabled).moe.enabled is enabled
    for wrong in ({"dtype": "other"}, {"max_tokens": 0}, {"kernels": True}):
        with pytest.raises(ValidationError):
            inference.DeepSpeedInferenceConfig(**wrong)


@pytest.mark.parametrize(
    ("old", "value", "section", "new"),
    [
        ("mp_size", 4, "tensor_parallel", "tp_size"), ("mpu", "units", "tensor_parallel", "mpu"),
        ("ep_size", 2, "moe", "ep_size"), ("moe_experts", [2], "moe", "moe_experts"),
        ("moe_type", "residual", "moe", "type"),
        ("expert_group", "ranks", "moe", "ep_group"),
    ],
)  # fmt: skip
def test_keys_of_former_times_are_put_where_they_are_now(old: str, value: Any, section: str, new: str) -> None:
    made = inference.DeepSpeedInferenceConfig(**{old: value})
    assert getattr(getattr(made, section), new) == value
    both = inference.DeepSpeedInferenceConfig(**{old: value, "moe": {"enabled": False}, "tp": {"tp_grain_size": 3}})
    assert getattr(getattr(both, section), new) == value
    assert (both.moe.enabled, both.tensor_parallel.tp_grain_size) == (False, 3)
    made = inference.DeepSpeedTPConfig(tp_grain_size=3), inference.DeepSpeedMoEConfig(enabled=False)
    assert inference.DeepSpeedInferenceConfig(**{old: value, "tp": made[0], "moe": made[1]}) == both


def test_requests_and_batches_of_rollouts_have_shapes_that_fit() -> None:
    ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5)
    batch = RolloutBatch(ids, mask, torch.tensor([2, 3]))
    assert (batch.batch_size, batch.seq_len) == (2, 5)
    for wrong, says in (
        (lambda: RolloutRequest(ids[0], mask[0]), "prompt_ids must be 2-D"),
        (lambda: RolloutRequest(ids, mask[:, :4]), r"\(2, 4\), does not match its shape \(2, 5\)"),
        (lambda: RolloutBatch(ids, mask[:1], torch.zeros(2)), "does not match"),
        (lambda: RolloutBatch(ids, mask, torch.zeros(3)), "1-D of length 2"),
        (lambda: RolloutBatch(ids, mask, torch.zeros(2, 1)), "1-D of length 2"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()


def test_an_engine_of_rollouts_of_ones_own() -> None:
    class Mine(RolloutEngine):
        name = "mine"

        def generate(self, request: Any, sampling: Any) -> Any:
            longer = torch.nn.functional.pad(request.prompt_ids, (0, sampling.max_new_tokens))
            return RolloutBatch(longer, torch.ones_like(longer), torch.full((len(longer),), 3))

        def sync_weights(self, step: int) -> None:
            self.step = step

    engine = Mine()
    batch = engine.generate(RolloutRequest(torch.ones(2, 3), torch.ones(2, 3)), SamplingConfig(max_new_tokens=4))
    assert batch.seq_len == 7
    assert engine.shutdown() is None
    with pytest.raises(TypeError, match="abstract"):
        RolloutEngine()


def test_keys_anywhere_in_a_document() -> None:
    document: dict[str, Any] = {"a": {"b": {"c": 1}}, "d": {"c": 2}, "e": [{"c": 3}]}
    assert (get_val_by_key(document, "c"), get_val_by_key(document, "d"), get_val_by_key(document, "z")) == (
        1,
        {"c": 2},
        None,
    )
    set_val_by_key(document, "c", 9)
    assert document == {"a": {"b": {"c": 9}}, "d": {"c": 9}, "e": [{"c": 3}]}


# -- shapes of ranks --------------------------------------------------------------------------------------------------


def test_which_ranks_a_smaller_shape_reads() -> None:
    """As DeepSpeed 0.19.8 gives them."""
    (one,) = model_3d_desc(4, 4, 2).reshape(model_3d_desc(2, 2, 1))
    assert one.get_data(0, 0) == [0, 16, 1, 17, 4, 20, 5, 21]
    assert one.get_data(1, 1) == [10, 26, 11, 27, 14, 30, 15, 31]
    three = model_3d_desc(4, 2, 3).reshape(model_3d_desc(2, 1, 3))
    assert [each.get_data(1, 0) for each in three] == [[4, 12, 20, 5], [13, 21, 6, 14], [22, 7, 15, 23]]
    (uneven,) = model_3d_desc(3, 2, 2).reshape(model_3d_desc(2, 1, 1))
    assert [uneven.get_data(pp_index=i) for i in range(2)] == [[0, 6, 1, 7, 2, 8], [3, 9, 4, 10, 5, 11]]
    assert model_3d_desc(2, 2, 2).is_valid(2, 0, 0) == (False, ["PP indexing error: index 2 >= degree 2"])
    for larger, axis in (((2, 1, 1), "PP: 1 ---> 2"), ((1, 3, 1), "TP: 1 ---> 3"), ((1, 1, 2), "DP: 1 ---> 2")):
        with pytest.raises(AssertionError, match=f"Expansion reshape not supported - {axis}"):
            model_3d_desc().reshape(model_3d_desc(*larger))
    with pytest.raises(AssertionError, match="3 parts cannot be shared out among 2 ranks"):
        reshape_meg_2d_parallel(3, 1, 2, 1)


shapes = st.tuples(*[st.integers(1, 4)] * 3)


@given(shapes, shapes)
def test_every_rank_is_read_once(target: tuple[int, ...], times: tuple[int, ...]) -> None:
    source = model_3d_desc(*(t * k for t, k in zip(target, times, strict=True)))
    read = [rank for one in source.reshape(model_3d_desc(*target)) for rank in one.get_data()]
    assert sorted(read) == list(range(source.world_size()))


def written(folder: Path, models: int, ranks: int, told: list[Any] | None = None) -> Path:
    for m in range(models):
        state = {} if told is None or told[m] is None else {"checkpoint_parallel_dimensions": told[m]}
        torch.save(state, folder / f"mp_rank_{m:02d}_model_states.pt")
        for d in range(ranks):
            torch.save({}, folder / f"bf16_zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt")
    return folder


def test_the_shape_that_wrote_a_checkpoint(tmp_path: Path) -> None:
    shape = get_model_3d_descriptor(str(written(tmp_path, 4, 3)))
    assert (shape.pp_degree, shape.tp_degree, shape.dp_degree) == (1, 4, 3)
    for layer in range(3):
        for rank in range(2):
            torch.save({}, tmp_path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    shape = get_model_3d_descriptor(tmp_path)
    assert (shape.pp_degree, shape.tp_degree, shape.dp_degree) == (2, 2, 3)
    shape = get_model_3d_descriptor(written(tmp_path, 4, 3, [{"pp_degree": 4, "tp_degree": 1}] * 4))
    assert (shape.pp_degree, shape.tp_degree, shape.dp_degree) == (4, 1, 3)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([{"pp_degree": 2, "tp_degree": 1}, None], "missing from model-state files"),
        ([{"pp_degree": 2, "tp_degree": 1}, {"pp_degree": 1, "tp_degree": 2}], "disagrees across model-state files"),
        ([{"pp_degree": 2}] * 2, "two degrees above 0"),
        (["two"] * 2, "two degrees above 0"),
        ([{"pp_degree": 4, "tp_degree": 1}] * 2, "has 2 files of a model; 4 stages x 1 ranks"),
    ],
)
def test_files_that_disagree_about_the_shape(tmp_path: Path, told: list[Any], says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        get_model_3d_descriptor(written(tmp_path, 2, 1, told))


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no folder of a checkpoint"):
        get_model_3d_descriptor(tmp_path)

"""Attention over sequences that are split over ranks, under DeepSpeed's names: Jacobs et al. 2023, "DeepSpeed Ulysses",
section 3, by :func:`zoo.comm.exchange`; see :mod:`zoo.nn.sequence`.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator, exchange
from zoo.deepspeed.adapters.communication import comm as dist
from zoo.deepspeed.adapters.sequences import sequence_ranks
from zoo.deepspeed.adapters.sequences.tiled_compute import apply_rotary_pos_emb

_log = logging.getLogger("zoo.deepspeed")
_WHOLE_MASKS = ("eager", "paged|eager", "flex_attention")
_NEEDED = {
    "input_ids": "the tokens (B, S)",
    "position_ids": "torch.arange(S) for each sequence, beginning anew where documents are packed",
    "labels": "a label for each token",
}


class DistributedAttention(nn.Module):
    """Any attention on whole sequences and a part of the heads.

    Args:
        local_attention: ``local_attention(q, k, v, *args, **kwargs)``.
        sequence_process_group: the P ranks that share a sequence.
        scatter_idx: dim of the heads, which P divides. gather_idx: dim of the sequence.
        sp_stream: refused: transfers have a stream of their own.
        num_kv_heads: makes no difference: keys and values have their shapes.

    forward takes q, k and v with S/P tokens and all heads, and gives as many back; ``local_attention`` sees S tokens
    and 1/P of the heads.
    """

    def __init__(
        self, local_attention: Callable[..., torch.Tensor], sequence_process_group: Any, scatter_idx: int = 2,
        gather_idx: int = 0, sp_stream: Any = None, num_kv_heads: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if sp_stream is not None:
            raise NotImplementedError(
                "DistributedAttention(sp_stream=...): leave it out; zoo's transfers have their own."
            )
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._comm = Communicator(sequence_process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedAttention:
        """A copied model is among the same ranks: groups have no copies."""
        memo[id(self.spg)] = self.spg
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of this rank's queries to the whole sequence. Collective over the group.

        Args:
            batch_dim_idx: makes no difference: dims are named by ``scatter_idx`` and ``gather_idx``.
            rotary_pos_emb: (cosines, sines) of the whole sequence, (S, 1, 1, R), for queries and keys.
        """
        q, k, v = exchange(
            (query, key, value), self._comm, split_dim=self.scatter_idx, join_dim=self.gather_idx,
            label="queries, keys and values by head",
        )  # fmt: skip
        if rotary_pos_emb is not None:
            cosines, sines = (x.transpose(0, 1) if self.gather_idx == 1 else x for x in rotary_pos_emb)
            q, k = (apply_rotary_pos_emb(x, cosines, sines) for x in (q, k))
        out = self.local_attn(q, k, v, *args, **kwargs)
        (out,) = exchange(
            (out,), self._comm, split_dim=self.gather_idx, join_dim=self.scatter_idx, label="attention by sequence"
        )
        return out


class UlyssesSPAttentionHF(nn.Module):
    """An attention function of transformers on sequences that P ranks share: (B, H, S/P, D) → (B, S/P, H D).

    Args:
        attn: of ``transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS``.
        batch_size, attn_head_size, num_hidden_layers: make no difference: tensors have their shapes.
        attn_head_count: H, of queries; P divides it. kv_head_count: K; P divides it, or it P.
        process_group: the P ranks.
        seq_length_is_variable: otherwise a sequence has ``global_seq_length`` tokens, a rank ``local_seq_length``.
        disable_in_eval: in evaluation mode each rank has whole sequences of its own.

    Raises:
        ValueError: numbers of heads that do not fit.
    """

    def __init__(
        self, attn: Callable[..., Any], batch_size: int, attn_head_count: int, attn_head_size: int, kv_head_count: int,
        num_hidden_layers: int, process_group: Any, seq_length_is_variable: bool = False,
        local_seq_length: int | None = None, global_seq_length: int | None = None, disable_in_eval: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attn, self.process_group, self.disable_in_eval = attn, process_group, disable_in_eval
        self._comm = Communicator(process_group)
        self.world_size, self.sp_rank = self._comm.size, self._comm.rank
        self.local_seq_length = None if seq_length_is_variable else local_seq_length
        if attn_head_count % self.world_size:
            raise ValueError(
                f"{attn_head_count} heads over {self.world_size} ranks that share a sequence; these divide them."
            )
        if kv_head_count % self.world_size and self.world_size % kv_head_count:
            raise ValueError(
                f"{kv_head_count} heads of keys and values over {self.world_size} ranks that share a sequence; one of "
                "the two divides the other."
            )
        self.repeats = max(1, self.world_size // kv_head_count)

    def forward(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        *args: Any, **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """(output, what ``attn`` returns beside). Collective over the group.

        Args:
            attention_mask: that of the whole sequence, or None.
            kwargs: among them ``position_ids``, of this rank's tokens: (B, S/P).

        Raises:
            AssertionError: there are none. ValueError: another length than ``local_seq_length``.
        """
        if self.disable_in_eval and not module.training:
            found: tuple[torch.Tensor, Any] = self.attn(module, query, key, value, attention_mask, *args, **kwargs)
            return found
        if self.local_seq_length not in (None, query.shape[2]):
            raise ValueError(
                f"a rank got {query.shape[2]} tokens of a sequence, and was made for {self.local_seq_length}: pad "
                "batches, or register with seq_length_is_variable=True."
            )
        kwargs["position_ids"] = self._whole_positions(kwargs.get("position_ids"))
        key, value = (x.repeat_interleave(self.repeats, dim=1) if self.repeats > 1 else x for x in (key, value))
        q, k, v = exchange((query, key, value), self._comm, split_dim=1, join_dim=2, label="queries, keys and values")
        groups = getattr(module, "num_key_value_groups", None)
        if self.repeats > 1 and groups is not None:
            setattr(module, "num_key_value_groups", q.shape[1] // k.shape[1])  # noqa: B010 - of another's module
        try:
            out, weights = self.attn(module, q, k, v, attention_mask, *args, **kwargs)
        finally:
            if self.repeats > 1 and groups is not None:
                module.num_key_value_groups = groups
        (out,) = exchange((out,), self._comm, split_dim=1, join_dim=2, label="attention by sequence")
        return out.reshape(*out.shape[:2], -1), weights

    def _whole_positions(self, own: torch.Tensor | None) -> torch.Tensor:
        if own is None:
            raise AssertionError(
                "sequences that ranks share need position_ids in every forward: those of the whole sequence, "
                "torch.arange(S), of which each rank has its part; UlyssesSPDataLoaderAdapter gives them."
            )
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own.contiguous(), group=self.process_group)
        return torch.cat(found, dim=1)

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: Any, core_attn_implementation: str, sequence_parallel_size: int,
        micro_batch_size: int, seq_length: int | None = None, seq_length_is_variable: bool = True,
        disable_in_eval: bool = False, max_length: int | None = None,
    ) -> Any:  # fmt: skip
        """From now on ``core_attn_implementation`` of transformers works on shared sequences. A collective of the job.

        Args:
            model_name_or_path: a model of transformers, or what ``AutoConfig.from_pretrained`` takes.
            core_attn_implementation: "sdpa", or a kind of flash attention: masks are dropped, causal ones are made by
                the attention itself.
            max_length: an older name of ``seq_length``.

        Returns:
            the ``mpu`` for ``initialize``; None with one rank a sequence.

        Raises:
            ValueError: another attention than the model's, or one that needs a mask of the whole sequence; a fixed
                length that is not given.
        """
        if sequence_parallel_size == 1:
            return None
        if max_length is not None:
            _log.warning("register_with_transformers(max_length=...) is an older name of seq_length.")
            seq_length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable and seq_length is None:
            raise ValueError("register_with_transformers(seq_length_is_variable=False) needs seq_length=.")
        functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        config = _config_of(model_name_or_path, core_attn_implementation)
        if core_attn_implementation in _WHOLE_MASKS or core_attn_implementation not in functions:
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}: with sequences that ranks share it is 'sdpa' "
                "or a kind of flash attention that transformers knows."
            )
        sequence_ranks.initialize_sequence_parallel(sequence_parallel_size)
        text = config.get_text_config()
        heads = text.num_attention_heads
        core = getattr(functions[core_attn_implementation], "zoo_core", functions[core_attn_implementation])
        attention = cls(
            core, micro_batch_size, heads, getattr(text, "head_dim", None) or text.hidden_size // heads,
            getattr(text, "num_key_value_heads", None) or heads, text.num_hidden_layers,
            sequence_ranks.get_sequence_parallel_group(), seq_length_is_variable,
            None if seq_length is None else seq_length // sequence_parallel_size, seq_length, disable_in_eval,
        )  # fmt: skip

        def shared(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            """What transformers calls: its mask is that of a part, and says nothing of the whole."""
            alone = disable_in_eval and not module.training
            return attention(module, query, key, value, attention_mask if alone else None, *args, **kwargs)

        shared.zoo_core = core  # type: ignore[attr-defined]
        functions[core_attn_implementation] = shared
        return sequence_ranks


def _config_of(model: Any, wanted: str) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        return import_module("transformers").AutoConfig.from_pretrained(model)
    has = getattr(config, "_attn_implementation", None)
    if has not in (None, wanted):
        raise ValueError(
            f"core_attn_implementation={wanted!r}, and the model's is {has!r}: load the model with "
            f"attn_implementation={wanted!r}, or give {has!r} here."
        )
    return config


class UlyssesSPDataLoaderAdapter:
    """Batches of a loader, each of which P ranks share: P batches of each rank's loader become P² parts.

    A batch is a dict of tensors (B, S, …), among them ``input_ids``, ``position_ids`` and ``labels``; what comes out
    has ``shift_labels`` (the label of the next token, -100 after the last) instead of labels, and of every tensor this
    rank's S/P tokens, on the CPU. First come the parts of rank 0's batch, then those of rank 1's, and so on.

    Args:
        dl: the loader of this rank. sp_rank, sp_group, sp_world_size: of the ranks that share sequences.
        device: over which tensors are exchanged.

    The epoch ends on all ranks when the first of their loaders does; a warning names those that have more.

    Raises:
        ValueError: on all ranks: no ``input_ids``, ``position_ids`` or ``labels``, a length that P does not divide,
            tensors of other lengths, or batches of ranks that differ in what they have.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.device = torch.device(device)
        self.iter = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __getattr__(self, name: str) -> Any:
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Exchange the next batch of each rank. A collective of the group; at the end of an epoch it ends."""
        batch, wrong, failed = None, "", None
        try:
            given = next(self.iter, None)
            wrong = "" if given is None else _wrong_with(given, self.sp_world_size)
            batch = None if given is None or wrong else dict(given)
        except Exception as error:  # the others are waiting, and are told
            failed, wrong = error, f"{type(error).__name__} of its loader: {error}"
        told: list[Any] = [None] * self.sp_world_size
        dist.all_gather_object(told, wrong or _kinds(batch), group=self.sp_group)
        if failed is not None:
            raise failed
        self._check(told)
        if batch is None or None in told:
            self.iter = iter(self.dl)
            raise StopIteration
        lengths = [lengths for lengths, _ in told]
        whole: list[dict[str, Any]] = [{} for _ in range(self.sp_world_size)]
        for name in told[0][1]:
            for found, one in zip(whole, self._of_all(name, batch[name], lengths), strict=True):
                found[name] = one
        self.micro_batches.extend(map(self._part, whole))

    def _check(self, told: list[Any]) -> None:
        """What the ranks have: (lengths, kinds by name), None at the end, or what is wrong."""
        wrong = [f"rank {rank} got {one}" for rank, one in enumerate(told) if isinstance(one, str)]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}. (Ranks of those that share sequences.)")
        more = [rank for rank, one in enumerate(told) if one is not None]
        if 0 < len(more) < len(told):
            _log.warning(
                "the loaders of ranks that share sequences have different lengths: ranks %s have batches that nobody "
                "gets, because the others have no more. Give each the same number (drop_last, DistributedSampler).",
                more,
            )
        elif more and any(kinds != told[0][1] for _, kinds in told):
            each = "; ".join(f"rank {rank} has {kinds}" for rank, (_, kinds) in enumerate(told))
            raise ValueError(f"the batches of ranks that share sequences differ in what they have: {each}.")

    def _of_all(self, name: str, value: Any, lengths: list[tuple[int, int]]) -> list[Any]:
        if not isinstance(value, torch.Tensor):
            others: list[Any] = [None] * self.sp_world_size
            dist.all_gather_object(others, value, group=self.sp_group)
            return others
        found = [value.new_zeros((*shape, *value.shape[2:]), device=self.device) for shape in lengths]
        dist.all_gather(found, value.to(self.device).contiguous(), group=self.sp_group)
        return found

    def _part(self, batch: dict[str, Any]) -> dict[str, Any]:
        labels = batch.pop("labels")
        batch["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        size = batch["input_ids"].shape[1] // self.sp_world_size
        here = slice(size * self.sp_rank, size * (self.sp_rank + 1))
        return {
            name: value[:, here].contiguous().cpu() if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }


def _wrong_with(batch: Any, ranks: int) -> str:
    """What a batch is not, as a sentence without its end; "" where it is well."""
    if not isinstance(batch, Mapping):
        return f"a batch that is a {type(batch).__name__}; it is a dict of tensors"
    for name, hint in _NEEDED.items():
        if not isinstance(batch.get(name), torch.Tensor):
            return f"a batch whose sequences ranks share that has no {name}: {hint}. Have the collator add them"
    begins = tuple(batch["input_ids"].shape[:2])
    if len(begins) < 2:
        return f"input_ids of shape {begins}; they are (B, S)"
    if begins[1] % ranks:
        return f"a sequence of {begins[1]} tokens for {ranks} ranks that share it; pad to a multiple"
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and tuple(value.shape[:2]) != begins:
            return f"a batch whose {name} has the shape {tuple(value.shape)}; it is to begin as input_ids', {begins}"
    return ""


def _kinds(batch: dict[str, Any] | None) -> tuple[tuple[int, int], dict[str, str]] | None:
    """(B, S), and by name what has to be the same on all ranks; None of no batch."""
    if batch is None:
        return None
    batch_size, length = batch["input_ids"].shape[:2]
    return (batch_size, length), {
        name: f"{str(value.dtype).removeprefix('torch.')} (B, S{''.join(f', {n}' for n in value.shape[2:])})"
        if isinstance(value, torch.Tensor) else "an object"
        for name, value in sorted(batch.items())
    }  # fmt: skip

"""Names of the files of DeepSpeed's checkpoints, and keys in them; what writes and reads one file."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The file of a model-parallel rank's weights."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The file of a rank's part of the optimizer's states."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: int | str, tp_rank: int) -> str:
    """The file of a layer of a pipeline."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


@dataclass
class SubparamShape:
    """Of a parameter that is several in one: which ones these are, and along what they are split over ranks."""

    patterns: list[str] = field(default_factory=list)
    shape: tuple[tuple[int, ...] | int, ...] = ()
    partition_dim: int = 0


# -- one file ---------------------------------------------------------------------------------------------------------


@dataclass
class CheckpointCommitInfo:
    """Which checkpoint is written."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """What writes and reads the files of a checkpoint, for loops of a program's own: zoo's engine has another way."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write a file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """All files are written."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, and those around it."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether a data-parallel rank writes: the first does."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written while training goes on."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory do so after loading too."""
        return True

    def cleanup(self) -> None:  # noqa: B027 - subclasses may have something open
        """Nothing is open."""


class TorchCheckpointEngine(CheckpointEngine):
    """By ``torch.save``: the file is there whole, and on the disk, when :meth:`save` returns, or it is as before."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = type(self).__name__

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to do."""

    def save(self, state_dict: Any, path: str) -> None:
        """See the class."""
        final = Path(path)
        writing = final.with_name(f".writing-{final.name}")
        try:
            with writing.open("wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
            writing.replace(final)
        finally:
            writing.unlink(missing_ok=True)

    def load(self, path: str, map_location: Any = None) -> Any:
        """``torch.load`` with ``weights_only=False``: of files that are trusted."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """True: every file is on the disk already."""
        return True

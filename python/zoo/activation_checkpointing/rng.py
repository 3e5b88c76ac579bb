"""Random states with names: dropout that differs, or not, between tensor-parallel ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from zoo.comm import local_device

__all__ = [
    "MODEL_PARALLEL",
    "CudaRNGStatesTracker",
    "replaying",
    "seed_device",
    "seed_model_parallel",
    "set_state",
    "state_of",
]

MODEL_PARALLEL = "model-parallel-rng"
"""The state that differs between tensor-parallel ranks."""

OFFSET = 2718
"""Between the seed of the default state and that of tensor rank 0's own one, as in Megatron-LM and DeepSpeed, so that
a run repeats the numbers of theirs."""


def state_of(device: torch.device) -> torch.Tensor:
    """A copy of the state of a device's default generator: (n,) uint8, on the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_state(state: torch.Tensor, device: torch.device) -> None:
    """The device's default generator goes on from there."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the default generator of one device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class CudaRNGStatesTracker:
    """Random states by name; :meth:`fork` draws from one of them, and everything outside goes on as if it had not.

    The name is that of the documents. The states are of the default generator of ``device``: of the GPU in use, and of
    the CPU in a process that has none, or that says so.

    Args:
        device: whose generator; None for the GPU of this process where there is one, else the CPU, found out when it
            is first needed. May be set later, before the first :meth:`add`.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    @property
    def device(self) -> torch.device:
        """Whose generator the states are of."""
        if self._device is None:
            self._device = local_device()
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        if self.states_:
            raise ValueError(
                f"the tracker has states of {self._device}; reset() it before it gets another device, {device}."
            )
        self._device = torch.device(device)

    def reset(self) -> None:
        """No states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Name → state, for checkpoints: (n,) uint8 on the CPU; of an open fork the state from before it."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Go on from :meth:`get_states` of some time before."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state, that of a generator seeded with ``seed``. The generator in use does not change.

        Raises:
            ValueError: the name, or the seed, is there already.
        """
        if name in self.states_:
            raise ValueError(f"add({name!r}, {seed}): there is a state {name!r}; choose another name, or reset().")
        if seed in self.seeds_:
            raise ValueError(
                f"add({name!r}, {seed}): another state has the seed {seed} and would draw the same numbers; choose "
                "another seed."
            )
        before = state_of(self.device)
        try:
            seed_device(seed, self.device)
            self.states_[name] = state_of(self.device)
        finally:
            set_state(before, self.device)
        self.seeds_.add(seed)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state ``name``, which goes on; afterwards the generator is as before.

        Raises:
            ValueError: no such state.
        """
        if name not in self.states_:
            raise ValueError(
                f"fork({name!r}): no such state; there is {', '.join(map(repr, self.states_)) or 'none'}: add() it, "
                "or call model_parallel_cuda_manual_seed(seed)."
            )
        before = state_of(self.device)
        set_state(self.states_[name], self.device)
        try:
            yield
        finally:
            self.states_[name] = state_of(self.device)
            set_state(before, self.device)


@contextlib.contextmanager
def replaying(tracker: CudaRNGStatesTracker, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Forks draw again from these states; afterwards the tracker has its own."""
    before = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(before)


def seed_model_parallel(tracker: CudaRNGStatesTracker, seed: int, rank: int) -> None:
    """The default generator gets ``seed``; the tracker's only state is then "model-parallel-rng", seeded with
    ``seed + 2718 + rank``, ``rank`` being that of the tensor-parallel group."""
    tracker.reset()
    seed_device(seed, tracker.device)
    tracker.add(MODEL_PARALLEL, seed + OFFSET + rank)

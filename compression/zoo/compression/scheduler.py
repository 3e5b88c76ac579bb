"""What is done to the transforms of a model as training goes on."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.compression.attach import transforms_of
from zoo.compression.technique import Averages, Observes, Transform

_log = logging.getLogger("zoo.compression")


class CompressionScheduler:
    """Tells the transforms of a model which step it is, and brings together what ranks have seen.

    An engine has one by itself, from the section ``compression_training``. In a loop of one's own::

        model = init_compression(model, "config.json")
        scheduler = CompressionScheduler(model)
        for batch in batches:
            ...
            optimizer.step()
            scheduler.step()

    Args:
        model: with transforms.
        comm: ranks that see different data; None: this one alone.

    Attributes:
        steps: that are over.
    """

    def __init__(self, model: nn.Module, comm: Communicator | None = None) -> None:
        self._transforms, self._comm, self.steps = transforms_of(model), comm, 0
        self._told: set[int] = set()

    @property
    def transforms(self) -> list[Transform]:
        """All of them, each once, in the order of the model."""
        return list(self._transforms)

    def set_step(self, step: int) -> None:
        """So many steps are over."""
        self.steps = step
        for transform in self._transforms:
            transform.set_step(step)

    def step(self, *, skipped: bool = False) -> None:
        """One more step is over. Collective, where there are ranks and transforms that learn from what they see.

        Args:
            skipped: nothing was updated; what was seen in it does not count.
        """
        self._average(skipped)
        self._commit(skipped)
        self._look_for_idle()
        self.set_step(self.steps + 1)

    def _look_for_idle(self) -> None:
        """Say once what was attached and is passed by."""
        idle = [t.site.name for t in self._transforms if t.active and not t.used and id(t) not in self._told]
        self._told |= {id(t) for t in self._transforms if t.active}
        for transform in self._transforms:
            transform.used = False
        if idle:
            _log.warning(
                "in step %d nobody called the modules of %s: a module whose weight another one reads gives it the "
                "exact one, not the compressed one",
                self.steps, ", ".join(idle[:5]) + (f" and {len(idle) - 5} more" if len(idle) > 5 else ""),
            )  # fmt: skip

    def _average(self, skipped: bool) -> None:
        for transform in self._transforms:
            if not isinstance(transform, Averages):
                continue
            if skipped:
                transform.drop()
                continue
            mean = transform.summed()
            if mean is None:
                continue
            if self._comm is not None and self._comm.size > 1:
                mean = mean.to(self._comm.device)
                self._comm.all_reduce(mean).wait()
                mean /= self._comm.size
            transform.take(mean)

    def _commit(self, skipped: bool) -> None:
        observing = [t for t in self._transforms if isinstance(t, Observes)]
        if skipped:
            for transform in observing:
                transform.forget()
            return
        if not observing:
            return
        device = self._comm.device if self._comm is not None else torch.device("cpu")
        pieces = [transform.seen().to(device) for transform in observing]
        together = torch.cat(pieces)
        if self._comm is not None and self._comm.size > 1:
            self._comm.all_reduce(together, "max").wait()
        parts = torch.split(together, [piece.numel() for piece in pieces])
        for transform, part in zip(observing, parts, strict=True):
            if not math.isinf(float(part.max())):  # nobody has called it in this step
                transform.commit(part.clone())
            else:
                transform.forget()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and what transforms have that does not follow from it, by site and technique."""
        states = {_key(transform): transform.state_dict() for transform in self._transforms}
        return {"steps": self.steps, "transforms": {key: state for key, state in states.items() if state}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it has states of transforms that the model does not have; nothing has changed then.
        """
        known = {_key(transform): transform for transform in self._transforms}
        found = dict(state["transforms"])
        strange = sorted(set(found) - set(known))
        if strange:
            raise ValueError(
                f"the checkpoint has compression states of {', '.join(strange[:3])}"
                f"{', ...' if len(strange) > 3 else ''}, which this model does not have; it has "
                f"{', '.join(sorted(known)) or 'none'}. Compress the model as it was compressed when it was saved."
            )
        for key, transform in known.items():
            transform.load_state_dict(dict(found.get(key, {})))
        self.set_step(int(state["steps"]))


def _key(transform: Transform) -> str:
    return f"{transform.site.name}/{transform.site.technique}"

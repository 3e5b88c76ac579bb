"""What is done to the transforms of a model as training goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.comm import Communicator
from zoo.compression.attach import transforms_of
from zoo.compression.ranks import Ranks
from zoo.compression.technique import Averages, MadeOnce, Observes, Shared, Transform

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
        ranks: that see different data; ``Ranks.of_mesh`` of them where weights are split along axes of a mesh or ranks
            have other experts. None: this one alone. Collective then, and before anything is sharded.
        shared: what transforms of other ranks share, where this one has none of them.

    Attributes:
        steps: that are over.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks | Communicator | None = None, shared: Iterable[Shared] = ()
    ) -> None:  # fmt: skip
        self._transforms, self.steps = transforms_of(model), 0
        self._ranks = Ranks(ranks) if isinstance(ranks, Communicator) else ranks
        mine = {id(t.together): t.together for t in self._transforms if t.together is not None}
        kinds = {type(one) for one in mine.values()}
        self._shared = [*mine.values(), *(one for one in shared if type(one) not in kinds)]
        self._told: set[int] = set()
        if self._ranks is not None:
            self._ranks.settle(self._transforms, self._shared)
        self._unmade = [t for t in self._transforms if isinstance(t, MadeOnce)]

    @property
    def transforms(self) -> list[Transform]:
        """All of them, each once, in the order of the model."""
        return list(self._transforms)

    def set_step(self, step: int) -> None:
        """So many steps are over."""
        self.steps = step
        for transform in self._transforms:
            transform.set_step(step)
        for one in self._shared:
            one.set_step(step)

    def step(self, *, skipped: bool = False) -> None:
        """One more step is over. Collective, where there are ranks and transforms that learn from what they see.

        Args:
            skipped: nothing was updated; what was seen in it does not count.
        """
        self._average(skipped)
        self._commit(skipped)
        self._agree_on_masks()
        self._look_for_idle()
        self.set_step(self.steps + 1)

    def _look_for_idle(self) -> None:
        """Say once what was attached and is passed by."""
        # Whether experts are called depends on the data.
        idle = [
            t.site.name
            for t in self._transforms
            if t.active and not (t.used or t.place.apart) and id(t) not in self._told
        ]
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
        sums: dict[int, Tensor] = {}
        averaging = []
        for transform in self._transforms:
            if not isinstance(transform, Averages):
                continue
            if skipped:
                transform.drop()
                continue
            found = transform.summed()
            if found is None:
                continue
            comm = self._ranks.adding(transform) if self._ranks is not None else None
            if comm is not None and comm.size > 1:
                found = found.to(comm.device)
                comm.all_reduce(found).wait()
            averaging.append(transform)
            sums[id(transform)] = found
        for transform, comm in self._tied(averaging):
            comm.all_reduce(sums[id(transform)]).wait()
        for transform in averaging:
            found = sums[id(transform)]
            transform.take(found if self._ranks is None else found.div_(self._ranks.num_data))

    def _commit(self, skipped: bool) -> None:
        observing = [t for t in self._transforms if isinstance(t, Observes)]
        if skipped:
            for transform in observing:
                transform.forget()
            return
        found: dict[int, Tensor] = {}
        for comm, these in self._by_ranks(observing):
            device = comm.device if comm is not None else torch.device("cpu")
            pieces = [transform.seen().to(device) for transform in these]
            together = torch.cat(pieces)
            if comm is not None and comm.size > 1:
                comm.all_reduce(together, "max").wait()
            parts = torch.split(together, [piece.numel() for piece in pieces])
            found |= {id(transform): part.clone() for transform, part in zip(these, parts, strict=True)}
        for transform, comm in self._tied(observing):
            comm.all_reduce(found[id(transform)], "max").wait()
        for transform in observing:
            part = found[id(transform)]
            if not math.isinf(float(part.max())):  # nobody has called it in this step
                transform.commit(part)
            else:
                transform.forget()

    def _tied(self, transforms: Sequence[Any]) -> list[tuple[Any, Communicator]]:
        """Those that ranks with other layers have too, in one order on all of them: none waits for another in a
        circle."""
        if self._ranks is None:
            return []
        found = [(transform, self._ranks.tied(transform)) for transform in transforms]
        return sorted(((t, comm) for t, comm in found if comm is not None), key=lambda item: item[0].key)

    def _agree_on_masks(self) -> None:
        """Those that some ranks have made in this step, and others, which have not called the module, have not."""
        active = [t for t in self._unmade if t.active]
        if self._ranks is None or not active:
            return
        done: set[int] = set()
        for comm, these in self._by_ranks(active):
            if comm is None or comm.size == 1:
                done |= {id(t) for t in these if t.made is not None}
                continue
            flags = torch.tensor([[t.made is not None, t.made is None] for t in these], device=comm.device)
            flags = flags.to(torch.uint8)
            comm.all_reduce(flags.view(-1), "max").wait()
            for transform, (some, lack) in zip(these, flags.tolist(), strict=True):
                if some and lack:
                    mine = transform.made
                    mask = torch.zeros(transform.made_shape, dtype=torch.uint8, device=comm.device)
                    if mine is not None:
                        mask.copy_(mine)
                    comm.all_reduce(mask.view(-1), "max").wait()
                    transform.take_made(mask.bool())
                if some:
                    done.add(id(transform))
        self._unmade = [t for t in self._unmade if id(t) not in done]

    def _by_ranks(self, transforms: Sequence[Any]) -> list[tuple[Communicator | None, list[Any]]]:
        """Transforms by the ranks that have the same tensor, in the order of the first of each."""
        found: dict[int, tuple[Communicator | None, list[Any]]] = {}
        for transform in transforms:
            comm = self._ranks.seeing(transform) if self._ranks is not None else None
            found.setdefault(id(comm), (comm, []))[1].append(transform)
        return list(found.values())

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and what transforms have that does not follow from it, by site and technique: of all
        ranks on rank 0. Collective where weights are split or ranks have other layers or experts."""
        states = {transform.key: transform.state_dict() for transform in self._transforms}
        states = {key: state for key, state in states.items() if state}
        return {"steps": self.steps, "transforms": states if self._ranks is None else self._ranks.gather(states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it is no state of a scheduler, or has states of transforms that the model does not have; nothing
                has changed then.
        """
        if {"steps", "transforms"} - set(state):
            raise ValueError(
                f"a CompressionScheduler got a state with the keys {sorted(state)}; it wants steps and transforms, as "
                "its own state_dict() gives them."
            )
        known = {transform.key: transform for transform in self._transforms}
        everywhere = set(known) | (self._ranks.keys if self._ranks is not None else set())
        found = dict(state["transforms"])
        strange = sorted(set(found) - everywhere)
        if strange:
            raise ValueError(
                f"the checkpoint has compression states of {', '.join(strange[:3])}"
                f"{', ...' if len(strange) > 3 else ''}, which this model does not have; it has "
                f"{', '.join(sorted(everywhere)) or 'none'}. Compress the model as it was compressed when it was saved."
            )
        for key, transform in known.items():
            transform.load_state_dict(dict(found.get(key, {})))
        for one in self._shared:
            one.loaded = True
        self._unmade = [t for t in self._transforms if isinstance(t, MadeOnce)]
        self.set_step(int(state["steps"]))

"""What a ZeRO optimizer saves and loads: its state as logical slices."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

import zoo.zero.state.logical as state_io
from zoo.zero.inspection import Inspection

if TYPE_CHECKING:
    from zoo.zero.state.optimizer_states import OptimizerStates, StatesAway
    from zoo.zero.update.segments import Segment


_log = logging.getLogger("zoo.zero")


class SavedState(Inspection):
    """The part of :class:`~zoo.zero.ZeroOptimizer` that has to do with its state: saved, loaded, moved elsewhere."""

    states: OptimizerStates
    _away: StatesAway | None = None

    def state_slices(self, *, errors: Literal["ranks", "folded"] = "ranks") -> list[state_io.StateSlice]:
        """This rank's part of the training state. Every element of every tensor belongs to exactly one rank. Parameters
        have the names that they have in the model now; those that it does not have any more are left out.

        Args:
            errors: of lossy reductions: "ranks" saves e_r of each of the R ranks and what servers owe, s, from which
                as many ranks go on with the same bits. "folded" saves s + Σ_r e_r / R alone, one tensor in the place of
                R + 1, from which any number of ranks goes on; it is collective.

        Between two steps by which ranks agree on parameters (``zoo.optim``) each has values of its own, which are saved
        as well; what is saved as the parameter itself is their mean, whatever ``errors`` says. There this is
        collective, an all-reduce of the parameters in fp32.

        Raises:
            ValueError: ``errors`` is neither.
        """
        if errors not in ("ranks", "folded"):
            raise ValueError(f"errors={errors!r}; it is 'ranks', for those of each rank, or 'folded', for their sum.")
        gone = self._gone()
        found = [s for s in self._held(owned=True, means=True) if s.name not in gone]
        return self.folded(found) if errors == "folded" else found

    @torch.no_grad()
    def folded(self, slices: Iterable[Any]) -> list[state_io.StateSlice]:
        """``slices`` with errors as :meth:`state_slices` has them with ``errors="folded"``. Collective."""
        kept = [s for s in slices if s.role != "owed" and not s.role.startswith("feedback.")]
        gone = self._gone()
        return kept + [s for b in self._trainable for s in state_io.folded_slices(b) if s.name not in gone]

    def _gone(self) -> frozenset[str]:
        self.sharded.members.check()
        return state_io.gone_of(self.buckets)

    def state_scalars(self) -> dict[str, float]:
        """``"<role>/<name>"`` → value for the scalar optimizer states, and ``"zero/<key>"`` for the loss scaler."""
        gone = self._gone()
        return {key: value for key, value in self.held_scalars().items() if key.partition("/")[2] not in gone}

    def held_scalars(self) -> dict[str, float]:
        """The same, of what the model does not have any more too: as :meth:`held_slices`."""
        self.check_open()
        self.read_outcome()
        found = state_io.scalars_of(self.updater.segments)
        found |= state_io.late_scalars(self.updater.expected.made_later(self.updater.segments, self.param_groups))
        if self._scaler is not None:
            found |= {f"zero/{key}": value for key, value in self._scaler.state().items()}
        if self._feedback:
            found["zero/feedback_ranks"] = float(self.comm.size)
            found |= state_io.feedback_scalars(self._trainable)
            if self.updater.apart:
                found["zero/apart"] = state_io.APART_WITH_MEANS
        if self.updater.meetings is not None:
            found |= self.updater.meetings.counters(self.param_groups)
        return found

    def live_slices(self, *, owned: bool) -> list[state_io.StateSlice]:
        """As :meth:`held_slices`, with zeros for the states that there will be after the first step."""
        found = self.held_slices(owned=owned)
        there = {(s.name, s.role, s.start) for s in found}
        for segment in self.updater.segments:
            if owned and not segment.bucket.owns(segment.chunk):
                continue
            keeps = self.updater.expected.with_options(segment, self.param_groups[segment.group])
            for role, dtype in keeps.states.items():
                for run in state_io.runs_of(segment.bucket, segment.slices()) if role != "master" else ():
                    if (run.name, role, run.start) not in there:
                        zeros = torch.zeros((), dtype=dtype).expand(run.length)
                        found.append(
                            state_io.StateSlice(run.name, role, run.start, run.length, run.shape, zeros, run.box)
                        )
        gone = state_io.gone_of(self.buckets)
        return [item for item in found if item.name not in gone]

    def live_scalars(self) -> dict[str, float]:
        """As :meth:`state_scalars`, with 0 for the numbers that there will be after the first step."""
        found: dict[str, float] = {}
        for segment in self.updater.segments:
            for role in self.updater.expected.with_options(segment, self.param_groups[segment.group]).numbers:
                runs = state_io.runs_of(segment.bucket, segment.slices())
                found |= {f"{role}/{run.name}": 0.0 for run in runs if run.name not in segment.bucket.gone}
        return found | self.state_scalars()

    def named_groups(self) -> list[dict[str, Any]]:
        """The groups, with names of the whole model in the place of those parameters that the model still has."""
        self.sharded.members.check()
        found = []
        for group in self.param_groups:
            places = [(p._zoo_bucket, p._zoo_bucket.spec.names[p._zoo_slot]) for p in group["params"]]
            names = [(bucket.logical(key)[0], bucket) for bucket, key in places]
            found.append({**group, "params": [name for name, bucket in names if name not in bucket.gone]})
        return found

    @torch.no_grad()
    def load_state(self, read: state_io.Reader, scalars: Mapping[str, float], *, new_weights: bool = False) -> None:
        """Continue from the state that ``read`` and ``scalars`` give, saved at any world size and stage. Collective.

        The options of the parameter groups are no part of it: give ``param_groups`` those of the run that saved before
        this is called (learning rates, when ranks meet, a ``freeze_step`` that was found). What an optimizer that
        brings ranks together has counted is among ``scalars``.

        Args:
            new_weights: the parameters that ``read`` gives, alike on all ranks, are others than those that the states
                came with. Where ranks step by themselves a new round begins: what they have moved is forgotten.
            read: ``read(name, role, start, length)`` returns these elements as a 1-D tensor, or raises KeyError when
                there is no such state (nothing but parameters exists before the first step).
            scalars: the union of :meth:`state_scalars` of all ranks that saved.
        """
        self.check_open()
        self.read_outcome()
        self.sharded.settle()
        if self._in_backward is not None:
            self._in_backward.step()  # whatever it made is overwritten
        self.runtime.backward.check_running()
        if self._in_backward is not None or self.runtime.backward.failed:
            self.zero_grad()
        exact, apart = self.config.load_from_fp32_weights, bool(scalars.get("zero/apart"))
        read = state_io.taking_out(read)

        def fill(segment: Segment) -> bool:
            reader = state_io.from_ranks_apart(read, segment.bucket, scalars) if apart else read
            reader = reader if exact else state_io.rounded(reader, segment.bucket.spec.dtype)
            return state_io.fill_segment(segment, reader, scalars)

        mine = {k.removeprefix("zero/"): v for k, v in scalars.items() if k.startswith("zero/")}
        saved_losses = int(mine.pop("feedback_ranks", 0))
        if self.updater.meetings is not None:
            self.updater.meetings.take_counters(scalars, self.param_groups)
        self.updater.load(fill, self._options_of_update(), anew=new_weights)
        with self.updater.failing():  # what is there by now is a part of it
            state_io.fill_frozen([b for b in self.buckets if not b.spec.trainable], read)
            self._publish(updated=False)
            for bucket in self._trainable:
                state_io.fill_feedback(bucket, saved_losses, scalars, read)
        lost = [name for b in self._trainable for name in state_io.owed_to_nobody(b, saved_losses, read)]
        if lost and self.comm.rank == 0:
            _log.warning(
                "what compressed messages still owed to %d of the parameters (%s) is left out: here no ranks bring "
                "these together by such messages.", len(lost), ", ".join(lost[:3] + ["..."] * (len(lost) > 3)),
            )  # fmt: skip
        if self._scaler is not None and "scale" in mine:
            self._scaler.load(mine)

    def held_slices(self, *, owned: bool) -> list[state_io.StateSlice]:
        """What this rank holds of the training state; with ``owned`` what no other rank's slices have."""
        return self._held(owned=owned)

    def _held(self, *, owned: bool, means: bool = False) -> list[state_io.StateSlice]:
        """With ``means`` the parameters that ranks have apart are their mean: collective."""
        self.check_open()
        self.read_outcome()
        self.sharded.members.check()
        self.sharded.writes.take()
        self.updater.settle()
        meetings, values = self.updater.meetings, dict[int, torch.Tensor]()
        if means and meetings is not None and not meetings.agreed:
            values = state_io.means_of(self.updater.segments)
        found = list(state_io.slices_of(self.updater.segments, self.buckets, owned=owned, means=values))
        if owned and self.updater.apart:
            found += state_io.apart_slices(self.updater.segments)
        return found + [s for b in self._trainable for s in state_io.feedback_slices(b, owned=owned)]

    # Elsewhere -----------------------------------------------------------------------------------------------------

    def offload_states(
        self, include: Iterable[str] | None = None, device: str = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> int:  # fmt: skip
        """Move state from the device to host memory until :meth:`reload_states`; returns its bytes. Stages 1 to 3.

        Called again it moves more, and returns the bytes of everything that is away.

        Args:
            include: of "optim_states", "hp_params" (fp32 masters), "lp_params" (shards of the parameters, stage 3) and
                "lp_grads" (reduced gradients); None for all that the stage has.
            device: "cpu"; where parameters are on the CPU anyway nothing has to move.
            pin_memory, non_blocking: of the copies, on a GPU.

        Raises:
            ValueError: another stage or device, or a name that is none.
        """
        from zoo.zero.state.optimizer_states import StatesAway, states_named

        stage = self.config.stage
        names = states_named(include, stage)
        if stage == 0 or device != "cpu":
            raise ValueError(
                f"offload_states(device={device!r}) at stage {stage}; it needs 'cpu', and stage 1, 2 or 3."
            )
        self.check_open()
        self.read_outcome()
        self._away = self._away or StatesAway(self)
        self._away.take(names, pin_memory=pin_memory and torch.cuda.is_available(), non_blocking=non_blocking)
        return self._away.num_bytes()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what :meth:`offload_states` took away."""
        if self._away is not None:
            self._away.back(non_blocking=non_blocking)
            self._away = None

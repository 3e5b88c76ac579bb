"""Which of the candidates that the model cannot tell apart: optuna's sampler, asked and told."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from zoo.tuning.space import Candidate

__all__ = ["MissingError", "Proposals"]

ASKED = 24


class MissingError(ValueError):
    """optuna is not installed."""


class Proposals:
    """A study in memory; what was measured is told to it anew each time, so that a search can be resumed.

    Raises:
        MissingError: optuna is not installed.
    """

    def __init__(self, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise MissingError(
                'the model_based tuner needs the package optuna: pip install "zoo-core[tune]", or choose '
                '"autotuning": {"tuner_type": "random"} or "gridsearch", which do without.'
            ) from None
        self._optuna: Any = optuna
        self._seed = seed

    def choose(self, alike: Sequence[Candidate], trials: Sequence[tuple[Candidate, float | None]]) -> Candidate:
        """One of ``alike``: what the sampler asks for, if that is among them, else the first.

        Args:
            trials: that have ended, with the seconds of a step; None where they failed.
        """
        optuna = self._optuna
        everyone = [_values(candidate) for candidate in (*alike, *(candidate for candidate, _ in trials))]
        names = list(everyone[0])
        spaces = {
            name: optuna.distributions.CategoricalDistribution(sorted({values.get(name, "") for values in everyone}))
            for name in names
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = optuna.logging.get_verbosity()
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            try:
                sampler = optuna.samplers.TPESampler(seed=self._seed + len(trials), n_startup_trials=4)
                study = optuna.create_study(sampler=sampler)
                for candidate, seconds in trials:
                    values = _values(candidate)
                    study.add_trial(optuna.trial.create_trial(
                        params={name: values.get(name, "") for name in names}, distributions=spaces, value=seconds,
                        state=optuna.trial.TrialState.COMPLETE if seconds is not None else optuna.trial.TrialState.FAIL,
                    ))  # fmt: skip
                wanted = {tuple(_values(candidate).values()): candidate for candidate in reversed(alike)}
                for _ in range(ASKED):
                    trial = study.ask(spaces)
                    found = wanted.get(tuple(trial.params[name] for name in names))
                    if found is not None:
                        return found
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            finally:
                optuna.logging.set_verbosity(before)
        return alike[0]


def _values(candidate: Candidate) -> dict[str, str]:
    """As names of choices, which the sampler takes for categories."""
    values = candidate.to_dict()
    extra = values.pop("extra")
    return {name: str(value) for name, value in {**values, **extra}.items()}

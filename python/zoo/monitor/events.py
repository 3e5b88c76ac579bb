"""The names under which monitors show a step's numbers."""

from __future__ import annotations

from zoo.parts import StepRecord

__all__ = ["PREFIX", "events", "scales_loss"]

PREFIX = "Train/Samples/"
"""Before the name of everything that belongs to a step: the x axis is ``record.total_samples``."""

_MILLISECONDS = {
    "time/forward_s": f"{PREFIX}elapsed_time_ms_forward",
    "time/backward_s": f"{PREFIX}elapsed_time_ms_backward",
    "time/update_s": f"{PREFIX}elapsed_time_ms_step",
}


def events(record: StepRecord, *, scaled: bool = False) -> dict[str, float]:
    """Name → number, for the x ``record.total_samples``.

    ``train_loss``, ``lr``, ``loss_scale`` and ``elapsed_time_ms_{forward,backward,step}`` have the names and units that
    DeepSpeed documents for its monitors ("Monitoring", automatically logged data); the others are named alike. Metrics
    of parts and users keep their own names. What the record has no number for is left out.

    Args:
        record: of a step.
        scaled: whether the loss scale means something: training is in fp16.
    """
    rates = {"lr" if group == 0 else f"lr_group_{group}": rate for group, rate in enumerate(record.lr)}
    core: dict[str, float | None] = {
        "train_loss": record.loss,
        **rates,
        "loss_scale": record.loss_scale if scaled else None,
        "grad_norm": record.grad_norm,
        "skipped": record.skipped,
        "step": record.step,
        "step_s": record.step_s,
        "samples_per_s": record.samples_per_s,
        "tokens_per_s": record.tokens_per_s if record.tokens else None,
        "total_tokens": record.total_tokens or None,
        "wire_bytes": record.wire_bytes,
        "memory_bytes": record.memory_bytes,
    }
    found = {f"{PREFIX}{name}": float(value) for name, value in core.items() if value is not None}
    for name, value in record.metrics.items():
        known = _MILLISECONDS.get(name)
        found[known or name] = 1000.0 * value if known else float(value)
    return found


def scales_loss(config: object) -> bool:
    """Whether a configuration trains in fp16, which has a loss scale."""
    return bool(getattr(getattr(config, "fp16", None), "enabled", False))

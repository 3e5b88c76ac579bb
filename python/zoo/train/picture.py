"""The loss curve."""

from __future__ import annotations

from pathlib import Path

from zoo.train.history import History


def draw(history: History, path: Path, *, unit: str, baseline: tuple[str, float] | None, title: str) -> None:
    """Training loss (each step, and its running mean), validation loss, and the baseline as a line; a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only rank 0 draws
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = history.series("loss")
    axes.plot(steps, losses, color="#9db8d9", linewidth=0.7, label="training, each step")
    axes.plot(steps, running_mean(losses), color="#1f4e8c", linewidth=1.6, label="training, running mean")
    at, validation = history.series("validation_loss")
    axes.plot(at, validation, color="#c0392b", marker="o", markersize=4, linewidth=1.4, label="validation")
    if validation:
        axes.annotate(f"{validation[-1]:.3f}", (at[-1], validation[-1]), textcoords="offset points", xytext=(4, -14),
                      ha="right", color="#c0392b")  # fmt: skip
    if baseline is not None:
        name, loss = baseline
        axes.axhline(loss, color="#444444", linestyle="--", linewidth=1.2, label=f"{name}, validation: {loss:.3f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"loss (nats per {unit})")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path)


def running_mean(values: list[float], decay: float = 0.9) -> list[float]:
    """m_k = (sum_i decay^(k-i) v_i) / (sum_i decay^(k-i)): exponential weights, without the pull towards zero at
    first."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1.0
        out.append(total / weight)
    return out

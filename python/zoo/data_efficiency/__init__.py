"""Which samples a step sees, how long they are, which layers run and which tokens they see: engine parts.

* ``curriculum``: sequences that grow. ``metric_loader``: samples that are allowed as their metric says.
* ``layer_drop``: progressive layer dropping. ``random_ltd``: random layerwise token dropping.
* ``batch_loader``: micro-batches of about the same number of tokens.
* :class:`DataAnalyzer`, :class:`Metric`, :class:`Index`: a data set indexed by metrics, in files.
* ``schedules``: how difficulties grow.

Parts and sections are built by the engine from a configuration; what is used by hand is here, and is imported when
it is asked for, because every configuration looks at the sections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.data_efficiency.analyser import DataAnalyzer, Metric
    from zoo.data_efficiency.index import Index

__all__ = ["DataAnalyzer", "Index", "Metric"]

_WHERE = {"DataAnalyzer": "analyser", "Metric": "analyser", "Index": "index"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)

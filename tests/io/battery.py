"""Every backend; what the tests of this folder demand is demanded of each. A new one is one line."""

from typing import Any

from zoo.io import Mock

BACKENDS: dict[str, dict[str, Any]] = {
    "uring": {"backend": "uring"},
    "sqpoll": {"backend": "uring", "sqpoll_idle_ms": 20},
    "threads": {"backend": "threads"},
    "mock": {"backend": Mock(seed=1, reorder=True, short=0.2)},
}
"""Arguments of a `Handle`."""

"""Every backend; what the tests of this folder demand is demanded of each. A new one is one line."""

from zoo.io import Mock

BACKENDS = {
    "uring": "uring",
    "threads": "threads",
    "mock": Mock(seed=1, reorder=True, short=0.2),
}

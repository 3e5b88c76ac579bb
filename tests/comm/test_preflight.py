"""Which hosts a look before the start blames. The whole of it runs in tests/launch/test_many_nodes.py."""

from __future__ import annotations

import pytest

from zoo.comm.preflight import Check


@pytest.mark.parametrize(
    ("missed", "said"),
    [
        (["2", "2", "0,1,3", "2"], "host c: connections"),
        (["2", "2", "-", "2"], "host c: connections"),  # it reaches others, and nobody reaches it
        (["-", "-", "", "-"], None),
        (["1", "0", "-", "-"], "hosts a, b: connections"),
    ],
)
def test_the_host_with_most_lost_connections_is_named(missed: list[str], said: str | None) -> None:
    check = Check.__new__(Check)
    check._hosts = ["a", "b", "c", "d"]
    if said is None:
        check._blame(missed)
        return
    with pytest.raises(RuntimeError, match=said):
        check._blame(missed)

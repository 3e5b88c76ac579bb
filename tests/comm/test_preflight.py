"""Which hosts a look before the start blames. The whole of it runs in tests/launch/test_many_nodes.py."""

from __future__ import annotations

import socket
import threading

import pytest

from zoo.comm.preflight import Check, _answer


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


class Hosts:
    """Stands in for the store: where each host says that it is reached."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses

    def get(self, key: str) -> bytes:
        return self.addresses[int(key.removeprefix("address/"))].encode()


def looking(rank: int, addresses: list[str]) -> Check:
    check = Check.__new__(Check)
    check._hosts, check._rank, check._store = list("abcdefgh")[: len(addresses)], rank, Hosts(addresses)
    return check


def test_the_first_host_is_reached_as_its_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many a machine's own name means 127.0.1.1 to itself; to others that is not its address."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        there, elsewhere = f"127.0.0.1 {port}", f"127.0.1.1 {port}"
        assert looking(1, [elsewhere, there, there])._missed() == []
        assert looking(0, [there, there, elsewhere])._missed() == [2]


def test_hosts_that_do_not_answer_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they would take longer than the step has, and nobody would be told which they are."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    together = threading.Barrier(7)

    def silent(*_: object, **__: object) -> socket.socket:
        together.wait(60)
        raise TimeoutError

    monkeypatch.setattr("zoo.comm.preflight.socket.create_connection", silent)
    assert looking(0, ["127.0.0.1 9"] * 8)._missed() == [1, 2, 3, 4, 5, 6, 7]

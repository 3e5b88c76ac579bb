"""A stand-in for sshd and ssh. A host is another family of processes: what ends the client ends no process there.

``python remote.py serve PORT ADDRESS…`` starts what clients ask for, in its own environment; ``python remote.py PORT
ADDRESS COMMAND`` is the client, which carries input, output and the exit code. As with ssh, the command's pipes are
closed when the client is gone, and nothing else happens to it. Standard library alone, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from typing import IO

HOST = "ZOO_TEST_HOST"
"""Variable of what is started: the address by which it was."""
HEAD = 5
"""Bytes before each piece: its kind (1 or 2: a stream, 0: the exit code), and how many bytes follow."""


def serve(port: int, addresses: list[str]) -> None:
    """Until it is killed. Each connection has a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with selectors.DefaultSelector() as selector:
        for address in addresses:
            selector.register(socket.create_server((address, port)), selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in selector.get_map().values():
                        other.fileobj.close()  # type: ignore[union-attr]
                    session(connection)
                connection.close()


def session(connection: socket.socket) -> None:
    """One command, from its line on. Does not return."""
    with connection.makefile("rb", buffering=0) as file:
        line = file.readline().decode().rstrip("\n").encode().decode("unicode_escape")
    process = subprocess.Popen(
        ["sh", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, env={**os.environ, HOST: connection.getsockname()[0]},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    threading.Thread(target=_feed, args=(connection, process.stdin), daemon=True).start()
    outputs = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
    with selectors.DefaultSelector() as selector:
        for number in outputs:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                found = os.read(key.fd, 1 << 16)
                if found:
                    connection.sendall(piece(outputs[key.fd], found))
                else:
                    selector.unregister(key.fd)
    code = process.wait()
    connection.sendall(piece(0, str(128 - code if code < 0 else code).encode()))
    os._exit(0)


def _feed(connection: socket.socket, pipe: IO[bytes]) -> None:
    """The client's input; each direction has a thread, so that one which nobody takes does not stop the other."""
    buffer = b""
    while True:
        try:
            found = connection.recv(1 << 16)
        except OSError:
            found = b""
        if not found:  # the client is gone
            os._exit(0)
        pieces, buffer = taken(buffer + found)
        with contextlib.suppress(BrokenPipeError, ValueError):
            for _, data in pieces:
                pipe.write(data)
                pipe.flush()
                if not data:
                    pipe.close()


def reach(port: int, address: str, line: str) -> int:
    """Carry a command's input and output. Returns its exit code, 255 where the connection is lost."""
    try:
        connection = socket.create_connection((address, port), timeout=10)
    except OSError as error:
        sys.stderr.write(f"ssh: connect to host {address} port {port}: {error}\n")
        return 255
    connection.settimeout(None)
    connection.sendall(line.encode("unicode_escape") + b"\n")
    threading.Thread(target=_give, args=(connection,), daemon=True).start()
    buffer = b""
    while True:
        try:
            found = connection.recv(1 << 16)
        except OSError:
            found = b""
        if not found:
            sys.stderr.write(f"Connection to {address} closed by remote host.\n")
            return 255
        pieces, buffer = taken(buffer + found)
        for kind, data in pieces:
            if kind == 0:
                return int(data)
            while data:
                data = data[os.write(kind, data) :]


def _give(connection: socket.socket) -> None:
    found = b"-"
    while found:
        found = os.read(0, 1 << 16)
        with contextlib.suppress(OSError):
            connection.sendall(piece(1, found))  # of no bytes: the end of the input


def piece(kind: int, data: bytes) -> bytes:
    """As it goes over the connection."""
    return bytes([kind]) + len(data).to_bytes(HEAD - 1, "big") + data


def taken(buffer: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The whole pieces at the front, and the rest."""
    found = []
    while len(buffer) >= HEAD and len(buffer) >= (end := HEAD + int.from_bytes(buffer[1:HEAD], "big")):
        found.append((buffer[0], buffer[HEAD:end]))
        buffer = buffer[end:]
    return found, buffer


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3:])
    else:
        try:
            os._exit(reach(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
        except BrokenPipeError:
            os._exit(1)

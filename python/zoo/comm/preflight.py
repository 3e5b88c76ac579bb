"""One rank of a look at the hosts before a job starts: ``python -m zoo.comm.preflight HOST,HOST,… [--seconds S]``.

``zoo launch --check`` runs it once on each host, in the folder of the job, before anything else. In turn: every host
reaches the store of the first, sees the first one's file in this folder, is reached by every other one over TCP, and
takes part in an all-reduce. The first that fails is raised on rank 0 with the names of the bad hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_ELEMENTS = 1 << 18
_CONNECT_S = 5.0


def main() -> None:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(prog="python -m zoo.comm.preflight", description=__doc__)
    parser.add_argument("hosts", type=lambda text: text.split(","), help="their names, in the order of ranks")
    parser.add_argument("--seconds", type=float, default=60.0, help="that a host has to come")
    args = parser.parse_args()
    Check(args.hosts, args.seconds).run()


class Check:
    """What a rank does.

    Args:
        hosts: by rank.
        seconds: within which each step is done everywhere.
    """

    def __init__(self, hosts: list[str], seconds: float) -> None:
        self._hosts, self._seconds = hosts, seconds
        self._rank = int(os.environ["RANK"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=seconds)
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, len(hosts), is_master=self._rank == 0, timeout=wait, wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"host {hosts[self._rank]} cannot reach port {port} of {address}, where rank 0 is: "
                f"{str(error).splitlines()[0]}. Open the port there, or give another with --master-port, or another "
                "address with --master-addr."
            ) from None

    def run(self) -> None:
        """All steps.

        Raises:
            RuntimeError: what is wrong, with the names of hosts; on rank 0, or on the host that cannot go on.
        """
        address = os.environ["MASTER_ADDR"]
        self._step("store", "", f"did not come within {self._seconds:g} s to rank 0 at {address}")
        with self._file() as name:
            seen = Path(name).is_file() if name else True
            why = "" if seen else f"there is no {name} in its {os.getcwd()}, where {self._hosts[0]} has written it"
            self._step("folder", why, "does not share this folder; mount it there, or start in one that is shared")
        self._reach()
        self._reduce()
        self._store.set(f"over/{self._rank}", "-")
        if self._rank == 0:
            self._told("over")  # the store goes with this process

    def _step(self, step: str, problem: str, said: str) -> None:
        """Every rank tells what its problem is, "" for none; rank 0 raises for all of them, and the others wait for
        it."""
        self._store.set(f"{step}/{self._rank}", problem or "-")
        if self._rank == 0:
            told = self._told(step)
            bad = [rank for rank, text in enumerate(told) if text != "-"]
            if bad:
                why = next((f" ({told[rank]})" for rank in bad if told[rank]), "")
                raise RuntimeError(f"{self._names(bad)} {said}{why}.")
            self._store.set(f"{step}/done", "-")
        self._store.wait([f"{step}/done"], timedelta(seconds=3 * self._seconds))

    def _told(self, step: str) -> list[str]:
        """What each rank told; "" of one that did not."""
        until, found = time.monotonic() + self._seconds, []
        for rank in range(len(self._hosts)):
            key, left = f"{step}/{rank}", max(0.1, until - time.monotonic())
            try:
                self._store.wait([key], timedelta(seconds=left))
                found.append(self._store.get(key).decode())
            except RuntimeError:  # DistStoreError: the time is over
                found.append("")
        return found

    def _names(self, ranks: list[int]) -> str:
        return ("host " if len(ranks) == 1 else "hosts ") + ", ".join(self._hosts[rank] for rank in ranks)

    @contextlib.contextmanager
    def _file(self) -> Iterator[str]:
        """The name of a file that rank 0 has written here; on rank 0 "" where it could not."""
        name = f".zoo-launch-check-{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
        if self._rank == 0:
            try:
                Path(name).write_text("zoo launch --check\n")
            except OSError as error:
                name = ""
                sys.stderr.write(
                    f"zoo launch: this folder cannot be written to ({error.strerror}); it is not compared.\n"
                )
            self._store.set("file", name or "-")
        name = self._store.get("file").decode().removeprefix("-")
        try:
            yield name
        finally:
            if self._rank == 0 and name:
                Path(name).unlink(missing_ok=True)

    def _reach(self) -> None:
        """Each host connects to each other one, at the address by which it reaches rank 0."""
        with socket.create_server(("", 0)) as server:
            threading.Thread(target=_answer, args=(server,), daemon=True).start()
            self._store.set(f"address/{self._rank}", f"{self._own_address()} {server.getsockname()[1]}")
            missed = self._missed()
            self._store.set(f"missed/{self._rank}", ",".join(map(str, missed)) or "-")
            if self._rank == 0:
                self._blame(self._told("missed"))
            self._step("reach", "", "did not say whom it reaches")

    def _missed(self) -> list[int]:
        """The ranks that this one does not reach: all are tried at once, for one that drops packets takes seconds."""
        others = [rank for rank in range(len(self._hosts)) if rank != self._rank]
        with ThreadPoolExecutor(max_workers=64) as pool:
            return [rank for rank, made in zip(others, pool.map(self._connects, others), strict=True) if not made]

    def _blame(self, missed: list[str]) -> None:
        """Raise for the hosts with the most connections that failed, from them and to them."""
        counts = Counter[int]()
        for rank, text in enumerate(missed):
            for other in [int(one) for one in text.strip("-").split(",") if one]:
                counts.update((rank, other))
        worst = max(counts.values(), default=0)
        if worst:
            raise RuntimeError(
                f"{self._names(sorted(rank for rank in counts if counts[rank] == worst))}: connections with other "
                "hosts are refused or lost; open the ports of this network between all hosts, or name its device "
                "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
            )

    def _own_address(self) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
            tried.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), 9))
            return str(tried.getsockname()[0])

    def _connects(self, rank: int) -> bool:
        address, port = self._store.get(f"address/{rank}").decode().split()
        if rank == 0:  # what the first host takes for its address may be 127.0.1.1
            address = os.environ["MASTER_ADDR"]
        try:
            with socket.create_connection((address, int(port)), timeout=_CONNECT_S) as made:
                return made.recv(1) == b"."
        except OSError:
            return False

    def _reduce(self) -> None:
        """One all-reduce of 1 MiB: by nccl where there are GPUs, else by gloo."""
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        size = len(self._hosts)
        dist.init_process_group(
            backend, rank=self._rank, world_size=size,
            store=dist.PrefixStore("group", self._store),  # type: ignore[attr-defined]
            timeout=timedelta(seconds=self._seconds),
        )  # fmt: skip
        found = torch.full((_ELEMENTS,), float(self._rank + 1), device=device)
        dist.all_reduce(found)
        right = bool((found == size * (size + 1) / 2).all())
        self._step("reduce", "" if right else "another sum", f"computes another sum by {backend}")
        dist.destroy_process_group()


def _answer(server: socket.socket) -> None:
    while True:
        try:
            with server.accept()[0] as connection:
                connection.sendall(b".")
        except OSError:
            return


if __name__ == "__main__":
    main()

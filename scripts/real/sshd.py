"""OpenSSH's server on addresses of this host, with a key and a port of its own, and all its files in one folder.

    python -m scripts.real.sshd up FOLDER PORT ADDRESS…     then FOLDER/bin/ssh reaches these addresses
    python -m scripts.real.sshd down FOLDER

Needs the package openssh-server. Root is not needed, but root's server wants the folder /run/sshd, which is made.
"""

from __future__ import annotations

import getpass
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.real import servers


def missing() -> str | None:
    """Why there can be none here; None: there can."""
    if servers.find("sshd") is None or shutil.which("ssh") is None:
        return "sshd is not installed (Debian's package openssh-server)"
    return None


def up(folder: Path, port: int, addresses: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """Start it.

    Args:
        variables: of all that it starts.

    Raises:
        RuntimeError: it does not come up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("host", "client"):
        if not (folder / name).exists():
            servers.do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    listens = "".join(f"ListenAddress {address}\n" for address in addresses)
    sets = " ".join(f'"{name}={value}"' for name, value in (variables or {}).items())
    (folder / "sshd_config").write_text(
        f"Port {port}\n{listens}HostKey {folder}/host\nPidFile {folder}/sshd.pid\n"
        f"AuthorizedKeysFile {folder}/client.pub\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPrintMotd no\n"
        f"PermitRootLogin prohibit-password\nMaxStartups 100\nMaxSessions 100\n{f'SetEnv {sets}' if sets else ''}\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {folder}/client\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
    )
    binary = folder / "bin"
    binary.mkdir(exist_ok=True)
    (binary / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    (binary / "ssh").chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    servers.start(folder, "sshd", ["-D", "-e", "-f", str(folder / "sshd_config")])
    for address in addresses:
        servers.wait(lambda to=address: servers.done(str(binary / "ssh"), to, "true"), folder, f"sshd at {address}")


def down(folder: Path) -> None:
    """End it."""
    servers.stop(folder)


if __name__ == "__main__":
    if len(sys.argv) > 4 and sys.argv[1] == "up":
        up(Path(sys.argv[2]).absolute(), int(sys.argv[3]), sys.argv[4:])
    elif len(sys.argv) == 3 and sys.argv[1] == "down":
        down(Path(sys.argv[2]).absolute())
    else:
        sys.exit(str(__doc__))

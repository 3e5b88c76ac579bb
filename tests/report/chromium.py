"""A browser without a window, driven over two pipes by its devtools protocol: nothing but the browser is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PACKAGE = "chromium"
"""Of Debian and Ubuntu."""
PATIENCE_S = 180.0


def program() -> str | None:
    """Where a browser is; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Page:
    """A tab.

    Attributes:
        said: what a page has written on its console, raised, or asked the network for and did not get.
    """

    write: int
    read: int
    session: str = ""
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _rest: bytes = b""
    _number: int = 0
    _events: list[Mapping[str, Any]] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> Any:
        """What the browser answers."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self._event(found)

    def _message(self) -> Any:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            if not select.select([self.read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer.")
            piece = os.read(self.read, 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended.")
            self._rest += piece
        text, self._rest = self._rest.split(b"\0", 1)
        return json.loads(text)

    def _event(self, found: Mapping[str, Any]) -> None:
        method, params = found.get("method"), found.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.said.append(f"{params['type']}: {[arg.get('value') for arg in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.said.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.said.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        self._events.append(found)

    def open(self, url: str, *, width: int, dark: bool, height: int = 900) -> None:
        """Show a page, and wait until it is loaded and drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self._events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._event(self._message())

    def value(self, expression: str) -> Any:
        """Of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def picture(self, path: Path | None = None) -> bytes:
        """The whole page, as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        found = base64.b64decode(data)
        if path is not None:
            path.write_bytes(found)
        return found


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """An empty tab of a browser of its own."""
    name = program()
    if name is None:
        raise FileNotFoundError(f"there is no browser; install the package {PACKAGE}.")
    from_us, to_us = os.pipe(), os.pipe()

    def pipes() -> None:  # the protocol is on descriptors 3 and 4
        read, write = os.dup(from_us[0]), os.dup(to_us[1])
        os.dup2(read, 3)
        os.dup2(write, 4)

    with tempfile.TemporaryDirectory(prefix="zoo-browser-", ignore_cleanup_errors=True) as home:
        words = [
            name, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
            "--disable-background-networking", "--no-first-run", "--hide-scrollbars",
            f"--user-data-dir={home}", "about:blank",
        ]  # fmt: skip
        started = subprocess.Popen(
            words, preexec_fn=pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(from_us[0])
        os.close(to_us[1])
        page = Page(from_us[1], to_us[0])
        try:
            target = page.call("Target.createTarget", url="about:blank")["targetId"]
            page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            yield page
        finally:
            os.close(page.write)
            os.close(page.read)
            started.kill()
            started.wait()

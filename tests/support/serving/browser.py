"""Headless Chromium for tests of pages: driven over its DevTools protocol, through a pipe.

It is Debian's `chromium` package (`make browser` installs it); nothing is fetched.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
WITHIN_S = 120.0
"""How long a page may take: a busy machine answers in seconds."""
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe"),
)


class PageError(AssertionError):
    """A script of a page has failed, or a browser's command has."""


class Browser:
    """A page of a running Chromium: the addresses it has `requested`, and the `faults` that it complained of."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._held, self._number, self._session = b"", 0, ""
        self.requested: list[str] = []
        self.faults: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command of the protocol."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                if "error" in told:
                    raise PageError(f"{method}: {told['error']}")
                return told["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + WITHIN_S
        while b"\0" not in self._held:
            is_ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(self._from, 1 << 20) if is_ready else b""
            if not read:
                raise PageError("the browser does not answer")
            self._held += read
        message, self._held = self._held.split(b"\0", 1)
        told = json.loads(message)
        self._note(told)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        match told.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.faults.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if params["entry"]["source"] in ("security", "javascript"):
                self.faults.append(params["entry"]["text"])

    def open(self, url: str, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        """Show an address in a window of this size."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        told = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            raise PageError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return told["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WITHIN_S
        while not self.run(f"!!({condition})"):
            if time.monotonic() > deadline:
                raise PageError(
                    f"never became true: {condition}; the page shows: {self.run('document.body.innerText')}"
                )
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.command("Input.insertText", text=text)

    def press(self, name: str, *, code: int = 0, text: str = "") -> None:
        """Press a key and let it go."""
        key = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        self.command("Input.dispatchKeyEvent", type="keyDown", **key, **({"text": text} if text else {}))
        self.command("Input.dispatchKeyEvent", type="keyUp", **key)

    def picture(self, file: Path) -> None:
        """Write what the window shows as PNG."""
        file.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in this folder; it ends with the block."""
    assert CHROMIUM, "needs chromium: `make browser` installs it"
    read_end, to_browser = os.pipe()
    from_browser, write_end = os.pipe()
    # Chromium reads commands at descriptor 3 and writes answers at 4.
    shell = f'exec "$@" 3<&{read_end} 4>&{write_end}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", shell, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(read_end, write_end),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_end)
    os.close(write_end)
    try:
        browser = Browser(to_browser, from_browser)
        yield browser
        browser._session = ""
        browser.command("Browser.close")
    finally:
        os.close(to_browser)
        os.close(from_browser)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

"""A real Chromium for tests, driven through its debugging pipe: no further package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        deadline = time.monotonic() + 60
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._receive, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("Chromium does not answer.")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(line))

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Until the condition holds in the page."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Never came true in the page: {condition}")
            time.sleep(0.05)

    def open(self, path: Path) -> None:
        """Load a report and wait until all its figures are drawn."""
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.wait("document.documentElement?.dataset.ready === ''")

    def screen(self, width: int, height: int = 900) -> None:
        """Set the size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """Prefer "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def press(self, key: str, code: int, shown: str = "") -> None:
        """Press a key, as a person does."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": shown} if shown else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG, to look at."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What the console says: errors, warnings, uncaught exceptions, refused requests."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(str(params["entry"]))
        return found

    def requests(self) -> list[str]:
        """Every address asked for; a data: URI asks nobody."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        found = [str(event["params"]["request"]["url"]) for event in sent]
        return [address for address in found if not address.startswith("data:")]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start Chromium without a network, and stop it again."""
    assert EXECUTABLE is not None
    to_browser, our_send = os.pipe()
    our_receive, from_browser = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4.
    command = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"'
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    flags += ["--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["/bin/bash", "-c", command, EXECUTABLE, *flags],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(our_send, our_receive)
    finally:
        os.close(our_send)
        process.terminate()
        process.wait(30)
        os.close(our_receive)

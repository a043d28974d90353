"""Headless Chromium, steered over its debugging pipe: what a test needs of it, and no more."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium-headless-shell", "chromium")
_PATIENCE = 60.0


class Browser:
    """One browser with one page. Messages are JSON, ended by a zero byte, over file descriptors 3 and 4."""

    def __init__(self, profile: Path) -> None:
        found = next(filter(None, map(shutil.which, _NAMES)), None)
        assert found is not None, f"none of {', '.join(_NAMES)} is installed: `make test-browser` does it"
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--remote-debugging-pipe"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", shell, "browser", found, *flags, f"--user-data-dir={profile}"]
        with (profile.parent / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs_in, theirs_out)
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number = b"", 0
        self._password = ""
        self.num_questions = 0
        """How often the browser has asked for a password."""
        self.complaints: list[str] = []
        """What the page's console has said of errors, broken policies included."""
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        """A command to the page, and what it answers."""
        return self._ask(method, parameters, sessionId=self._session)

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def log_in(self, password: str) -> None:
        """Answer the browser's question for a password, from now on."""
        self._password = password
        self.ask("Fetch.enable", handleAuthRequests=True)

    def evaluate(self, expression: str) -> Any:
        """The value of some JavaScript, which works even where the page's policy or wish allows none."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Some JavaScript becomes true."""
        deadline = time.monotonic() + _PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} did not become true; {self.evaluate(_TEXT)}"
            time.sleep(0.02)

    @property
    def text(self) -> str:
        return str(self.evaluate(_TEXT))

    def press_tab(self) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)

    def screenshot(self, path: Path, *, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def _send(self, method: str, parameters: Any, **more: str) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **more}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._number

    def _ask(self, method: str, parameters: Any, **more: str) -> Any:
        number = self._send(method, parameters, **more)
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _read(self) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE)
            assert ready, "the browser says nothing"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        given = event.get("params", {})
        if event.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.complaints.append(given["entry"]["text"])
        if event.get("method") == "Fetch.requestPaused":
            self._send("Fetch.continueRequest", {"requestId": given["requestId"]}, sessionId=self._session)
        if event.get("method") == "Fetch.authRequired":
            self.num_questions += 1
            answer = {"response": "ProvideCredentials", "username": "me", "password": self._password}
            parameters = {"requestId": given["requestId"], "authChallengeResponse": answer}
            self._send("Fetch.continueWithAuth", parameters, sessionId=self._session)
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(given["exceptionDetails"]["text"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)


_TEXT = "document.body.innerText"

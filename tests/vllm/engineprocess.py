"""An engine in a process of its own, which tests kill: vLLM with the tiny model, attached to a node service or not."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tests.vllm.engines import SECONDS, Adapter, Answer, Engine, Prompt, Setup, eventually, running
from tests.vllm.nodeservice import NodeService, is_attached

from kvstow_service.connectors.engine_core import controlplane

_IDLE_SECONDS = 0.005


class EngineProcess:
    """Asks the engine in another process. Its scheduler and its rank share that process, so one SIGKILL ends both."""

    def __init__(
        self,
        model: Path,
        attach: str | None,
        log: Path,
        environ: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
        settings: Mapping[str, Any] | None = None,
        before: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        """`attach`: None for a pool of its own. `python`: of the environment that has the vLLM. `settings`: vLLM's.
        `before`: a connector that MultiConnector asks before KVStow's. Returns when the engine can be asked."""
        extra = extra if attach is None else {"attach": attach, **extra}
        options = json.dumps({"model": str(model), "extra": extra, "settings": dict(settings or {}), "before": before})
        path = ":".join(place for place in sys.path if place and "site-packages" not in place)
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "tests.vllm.engineprocess", options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"PYTHONPATH": path} | dict(environ or {}),
                text=True,
            )
        self._log = log
        self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, *prompts: Prompt, **how: Any) -> list[Answer]:
        """Answers of requests that run at once. `how`: see `Engine.ask`."""
        self.begin(*prompts, **how)
        return self.finish()

    def begin(
        self,
        *prompts: Prompt,
        tokens: int = 24,
        adapter: Adapter | None = None,
        image: int | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask, and do not wait: `finish` has the answers."""
        self._write("ask", prompts, tokens, adapter, image, transfer)

    def finish(self) -> list[Answer]:
        return [
            Answer(tuple(tokens), tuple({int(token): value for token, value in each} for each in logprobs), *rest)
            for tokens, logprobs, *rest in self._read()
        ]

    def forget_gpu(self) -> None:
        """Empty the GPU's prefix cache, and only that, when all stores have ended."""
        self._write("forget_gpu")
        self._read()

    def metric(self, name: str) -> float:
        """One of vLLM's own."""
        self._write("metric", name)
        return float(self._read())

    def be_patient(self, seconds: float) -> None:
        """Have requests wait so long for the service, which has a tier: on a busy machine a second is no fault. 0: as
        users have it."""
        self._write("be_patient", seconds)
        self._read()

    def stats(self, section: str) -> dict[str, Any]:
        """Of its own pool."""
        self._write("stats", section)
        return cast(dict[str, Any], self._read())

    def is_ready(self) -> bool:
        """What /readyz of its admin server says."""
        self._write("ready")
        return bool(self._read())

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def close(self) -> None:
        """Let it end by itself."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(SECONDS)

    def _write(self, *command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(SECONDS, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        assert line, f"the engine has ended:\n{self._log.read_text()[-8000:]}"
        return json.loads(line)


@contextmanager
def attached_engine(
    model: Path, service: NodeService, log: Path, settings: Mapping[str, Any]
) -> Iterator[EngineProcess]:
    """The only engine of the service, patient with it. At the end its session is over. `settings`: vLLM's."""
    engine = EngineProcess(model, service.attach, log, settings=settings)
    try:
        engine.be_patient(60)
        eventually(lambda: is_attached(service), "an attached engine")
        yield engine
    finally:
        engine.kill()
    eventually(lambda: not service.sessions(), "the end of its session")


def main(options: Mapping[str, Any]) -> None:
    words = os.fdopen(os.dup(1), "w")  # vLLM writes its log to the other one
    os.dup2(2, 1)
    commands = sys.stdin.fileno()
    setup = Setup(
        Path(options["model"]),
        extra=options["extra"],
        gpu_blocks=160,
        settings=options["settings"],
        before=options["before"],
    )
    with running(setup) as engine:

        def say(what: Any) -> None:
            words.write(json.dumps(what) + "\n")
            words.flush()

        say("ready")
        while True:
            while not select.select([commands], [], [], _IDLE_SECONDS)[0]:
                signal.alarm(SECONDS)  # from the last step or command on, not from the start
                engine.llm.llm_engine.step()
            signal.alarm(SECONDS)
            line = sys.stdin.readline()
            if not line:
                return
            command, *arguments = json.loads(line)
            say(_COMMANDS[command](engine, *arguments))


def _ask(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    adapter: Sequence[Any] | None,
    image: int | None,
    transfer: Mapping[str, Any] | None,
) -> Any:
    named = None if adapter is None else Adapter(*adapter)
    answers = engine.ask(*map(tuple, prompts), tokens=tokens, adapter=named, image=image, transfer=transfer)
    return [(each.tokens, [list(one.items()) for one in each.logprobs], *each[2:]) for each in answers]


def _be_patient(engine: Engine, seconds: float) -> None:
    controlplane.PATIENCE_SECONDS = seconds or 0.25
    controlplane.LONGEST_PATIENCE_SECONDS = seconds or 5.0
    controlplane.SLOW_SECONDS = seconds or 0.25
    controlplane.SILENT_SECONDS = seconds or 5.0


_COMMANDS: dict[str, Any] = {
    "ask": _ask,
    "be_patient": _be_patient,
    "forget_gpu": lambda engine: engine.forget_gpu(),
    "metric": lambda engine, name: engine.counter(name),
    "stats": lambda engine, section: engine.stats(section),
    "ready": lambda engine: engine.admin.get("/readyz").status_code == 200,
}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""A node service with a store below its pools, and one engine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import eventually
from tests.vllm.nodeservice import NodeService, is_attached

SECONDS = 120.0
_ENVIRON = {"PYTHONHASHSEED": "0"}


class StoredNode:
    """`options`: of the service, which say where the store is. It waits until the engine is attached and all parts of
    the store work."""

    def __init__(self, model: Path, folder: Path, options: tuple[str, ...], stack: ExitStack) -> None:
        folder.mkdir()
        self.service = NodeService(folder, "64MiB", *options, module="tests.vllm.patientservice")
        stack.callback(self.service.stop)
        self.service.start()
        self.engine = EngineProcess(model, self.service.attach, folder / "engine", _ENVIRON)
        stack.callback(self.engine.kill)
        eventually(lambda: is_attached(self.service), "an attached engine", SECONDS)
        eventually(self._is_on, "a store that works", SECONDS)
        self.engine.be_patient(60)

    def tier(self) -> dict[str, Any]:
        (item,) = self.service.get("/v1/tier")["items"]
        return dict(item)

    def _is_on(self) -> bool:
        view = self.service.get("/v1/tier")
        return bool(view["items"]) and {part["state"] for part in view["parts"]} == {"on"}

"""One run, from the seed to the report."""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
from tests.vllm.harness.core import EngineCore
from tests.vllm.harness.device import SimulatedDevice
from tests.vllm.harness.host import CONNECTOR, Host
from tests.vllm.harness.operator import Operator
from tests.vllm.harness.rank import Rank
from tests.vllm.harness.report import Report
from tests.vllm.harness.setup import Setup, make_geometry, make_vllm_config
from tests.vllm.harness.stream import ComputeStream
from tests.vllm.harness.traffic import Traffic

from kvstow.errors import IntegrityError
from kvstow_service.connectors.engine_core.loads import SharedLoads
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

_PATIENCE = 200  # steps without a token or an end; a load takes 10 at most


class Run:
    """Builds an engine, drives it until all requests have ended, and looks at what is left."""

    def __init__(self, setup: Setup, patch: pytest.MonkeyPatch, *, stop_at_problem: bool = False) -> None:
        self.report = Report()
        self._setup, self._stop_at_problem = setup, stop_at_problem
        random = Random(f"{setup.name}/{setup.seed}")
        stream = ComputeStream()
        self._host = Host(setup, random, stream, patch)
        self._count_waits(patch)
        config = make_vllm_config(setup, CONNECTOR, self._host.extra_config)
        geometry = make_geometry(setup, config)
        ranks = [Rank(rank, config, geometry.workers) for rank in range(setup.ranks)]
        self._core = EngineCore(setup, config, geometry, ranks, stream, self.report)
        self._traffic = Traffic(setup, random, self._core)
        self._operator = Operator(setup, random, self._core, self._host)
        self._count_layered(patch)

    def drive(self) -> None:
        before, since = -1, 0
        while not self._traffic.is_over or self._core.is_busy or self._operator.is_changing_weights:
            self._step()
            if self._stop_at_problem and self.report.problems:
                return
            progress = self._progress()
            before, since = progress, since + 1 if progress == before else 0
            if since > _PATIENCE:
                left = [f"{each.request_id}: {each.status.name}" for each in self._core.scheduler.requests.values()]
                self.report.add(f"stuck: nothing happens for {_PATIENCE} steps; left are {left}")
                return

    def finish(self) -> None:
        """Let what is in flight below the scheduler end; then look for leaks."""
        engine, pool = self._host.engine, self._core.block_pool
        self._operator.finish()
        self._host.exchange_reports()
        stats = engine.stats()
        self.report.loaded_blocks = stats.transfers.load.blocks
        self.report.stored_blocks = stats.transfers.store.blocks
        self.report.failed_loads = stats.transfers.load.error
        leaked = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        found = {
            "requests left": list(self._core.scheduler.requests),
            "GPU blocks leaked": leaked,
            "leases leaked": stats.pool.leases,
            "transfers left": [*engine.transfers()],
            "slots leaked": stats.pool.slots.leased + stats.pool.slots.filling + stats.pool.slots.quarantined,
            "wrong answers": [*self._wrong_answers()],
        }
        for what, value in found.items():
            if value:
                self.report.add(f"{what}: {value}")
        try:
            engine.check_integrity()
        except IntegrityError as error:
            self.report.add(f"integrity: {error}")

    def _count_waits(self, patch: pytest.MonkeyPatch) -> None:
        must_wait = SharedLoads.must_wait

        def note(loads: SharedLoads, tracked: TrackedRequest, *tokens: int) -> bool:
            is_first, waits = tracked.load.wait is None, must_wait(loads, tracked, *tokens)
            self.report.waits += is_first and waits
            return waits

        patch.setattr(SharedLoads, "must_wait", note)

    def _count_layered(self, patch: pytest.MonkeyPatch) -> None:
        load = SimulatedDevice.load_layers

        def note(*arguments: Any) -> Any:
            self.report.layered += 1
            return load(*arguments)

        patch.setattr(SimulatedDevice, "load_layers", note)

    def close(self) -> None:
        for connector in (self._core.connector, *(rank.connector for rank in self._core.ranks)):
            connector.shutdown()

    def _step(self) -> None:
        if not self._operator.is_changing_weights:
            self._traffic.step()
        self._operator.step()
        self.step_engine()

    def step_engine(self) -> None:
        """One step of vLLM and of all ranks."""
        self._host.exchange_reports()
        self._core.begin()
        self._host.advance()
        self._core.run_forward()
        self._host.advance()
        self._core.end()
        self._host.advance()

    def _progress(self) -> int:
        return sum(map(len, self._core.outputs.values())) + self.report.finished + self.report.aborted

    def _wrong_answers(self) -> list[str]:
        core = self._core
        expected = {
            name: core.sequences[name].tokens[core.sequences[name].num_prompt_tokens :] for name in core.outputs
        }
        return [name for name, tokens in core.outputs.items() if tokens != expected[name][: len(tokens)]]


def run(setup: Setup, patch: pytest.MonkeyPatch | None = None, *, stop_at_problem: bool = False) -> Report:
    """Drive one engine to the end. What it raises is a problem like any other."""
    with ExitStack() as stack:
        patch = patch or stack.enter_context(pytest.MonkeyPatch.context())
        this = Run(setup, patch, stop_at_problem=stop_at_problem)
        stack.callback(this.close)
        try:
            this.drive()
            if not (stop_at_problem and this.report.problems):
                this.finish()
        except Exception:  # noqa: BLE001 - a defect may raise anything
            this.report.add(f"raised: {traceback.format_exc()}")
        return this.report

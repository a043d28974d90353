"""The engine core: vLLM's scheduler, all ranks, one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.vllm.harness.rank import Rank
from tests.vllm.harness.report import Report
from tests.vllm.harness.runner import Forward, Runner
from tests.vllm.harness.sequence import Sequence as TokenSequence
from tests.vllm.harness.setup import Geometry, Setup
from tests.vllm.harness.stream import ComputeStream
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class InFlight(NamedTuple):
    """A step whose output the scheduler has not seen. `launch` is its number in the stream, 0 for an empty step."""

    output: Any
    forward: Forward
    launch: int
    reports: list[KVConnectorOutput]


class EngineCore:
    """Steps like vLLM's: with asynchronous scheduling the next step is scheduled and launched before the output of the
    one before is processed, so that one is always in flight."""

    def __init__(
        self,
        setup: Setup,
        config: Any,
        geometry: Geometry,
        ranks: Sequence[Rank],
        stream: ComputeStream,
        report: Report,
    ) -> None:
        init_none_hash(sha256)
        self.ranks, self.report = ranks, report
        self.sequences: dict[str, TokenSequence] = {}
        self.outputs: dict[str, list[int]] = {}
        self.on_moment: Callable[[Any], None] = lambda output: None
        """Called when a step has been planned, and when it has been launched on all ranks."""
        scheduler_class = AsyncScheduler if setup.asynchronous else Scheduler
        self.scheduler: Any = scheduler_class(
            vllm_config=config,
            kv_cache_config=geometry.scheduler,
            structured_output_manager=StructuredOutputManager(config),
            block_size=geometry.scheduler_block,
            hash_block_size=geometry.hash_block,
            log_stats=False,
        )
        self.connector = self.scheduler.connector
        self.hasher = get_request_block_hasher(geometry.hash_block, sha256)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, setup.ranks)
        self._runner = Runner(self.sequences, self.scheduler.requests, [rank.cache for rank in ranks], report)
        self._setup, self._stream = setup, stream
        self._in_flight: deque[InFlight] = deque()
        places = {rank: (rank.rank, 0) if setup.stages else (0, rank.rank) for rank in ranks}
        metadata = {place: rank.connector.get_handshake_metadata() for rank, place in places.items()}
        self.connector.set_xfer_handshake_metadata_pp_aware(metadata)

    @property
    def block_pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, cache_salt: str) -> None:
        length = len(prompt) + max_tokens + 2 * self._setup.drafts + 2
        self.sequences[request_id] = TokenSequence(prompt, cache_salt, length)
        self.outputs[request_id] = []
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                pooling_params=None,
                cache_salt=cache_salt or None,
                block_hasher=self.hasher,
            )
        )

    def abort(self, request_id: str | None) -> None:
        """Abort one request, or all."""
        self.report.aborted += len(self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED))

    def reset(self, *, preempt: bool) -> bool:
        """Forget all KV, on the device and in the pool; if vLLM says that it is done, the weights change with it."""
        done: bool = self.scheduler.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True)
        if done:
            self.report.resets += 1
            self.replace_weights()
        return done

    def replace_weights(self) -> None:
        for rank in self.ranks:
            rank.cache.weights += 1

    @property
    def has_steps_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def has_blocks_in_flight(self) -> bool:
        """Whether others than running requests hold blocks of the device: stores, loads, launched steps."""
        manager, running = self.scheduler.kv_cache_manager, self.scheduler.running
        tables = [table for request in running for table in manager.get_block_ids(request.request_id)]
        held = sum(bool(block) for table in tables for block in table)
        return bool(self._in_flight) or held < sum(
            block.ref_cnt for block in self.block_pool.blocks if not block.is_null
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight or self.scheduler.has_requests())

    def begin(self) -> None:
        """Schedule a step and launch it on all ranks."""
        if not self.scheduler.has_requests():
            return
        self.report.steps += 1
        output = self.scheduler.schedule()
        self.on_moment(output)
        self.report.preemptions += len(output.preempted_req_ids)
        for rank in self.ranks:
            rank.before(output)
        forward = self._runner.launch(output)
        has_forward = output.total_num_scheduled_tokens > 0
        launch = self._stream.launch(lambda: self._runner.run(forward)) if has_forward else 0
        reports = [rank.after(output) for rank in self.ranks]
        forward.invalid.update(*(report.invalid_block_ids for report in reports))
        self.on_moment(output)
        self._in_flight.append(InFlight(output, forward, launch, reports))

    def run_forward(self) -> None:
        """Let the stream get to the end of the oldest step, if its output is due."""
        if self._is_due():
            self._stream.run_until(self._in_flight[0].launch)

    def end(self) -> None:
        """Give the scheduler the output of the oldest step, if it is due."""
        if not self._is_due():
            return
        self.run_forward()
        step = self._in_flight.popleft()
        request_ids = list(step.forward.sampled)
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
                sampled_token_ids=[list(tokens) for tokens in step.forward.sampled.values()],
                kv_connector_output=report,
            )
            for report in step.reports
        ]
        merged = self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        for engine_outputs in self.scheduler.update_from_output(step.output, merged).values():
            for each in engine_outputs.outputs:
                self.outputs[each.request_id].extend(each.new_token_ids)
                self.report.finished += each.finish_reason is not None
        if self._setup.drafts and not self._setup.asynchronous:
            drafts = [[0] * self._setup.drafts for _ in request_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(request_ids, drafts))

    def _is_due(self) -> bool:
        """With asynchronous scheduling a step's output waits until the next step is launched, if there is one."""
        if not self._in_flight:
            return False
        return not self._setup.asynchronous or len(self._in_flight) > 1 or not self.scheduler.has_requests()

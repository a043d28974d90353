"""The model runner of all ranks: follows the scheduler's output like vLLM's, with a forward that only checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.harness.cache import KVCache
from tests.vllm.harness.report import Report
from tests.vllm.harness.sequence import Sequence as TokenSequence
from tests.vllm.harness.sequence import mix, rejected
from tests.vllm.harness.setup import BLOCK_TOKENS


@dataclass
class Row:
    """A request in the batch. `known` tokens have been sampled or given, `computed` of them have their KV.
    `replay_start`: where a replay of a window begins; 0 without one."""

    sequence: TokenSequence
    tables: list[list[int]]
    computed: int
    known: int
    replay_start: int


@dataclass
class Forward:
    """One launched step: what is computed of which rows, with their block tables at launch; then the tokens sampled.
    `invalid`: blocks that the ranks have reported as not loaded; what is computed with them is garbage."""

    step: int
    invalid: set[int] = field(default_factory=set)
    parts: list[tuple[str, Row, list[list[int]], int, int]] = field(default_factory=list)
    sampled: dict[str, list[int]] = field(default_factory=dict)


class Runner:
    """`launch` on the host, `run` when the stream gets there."""

    def __init__(
        self,
        sequences: Mapping[str, TokenSequence],
        requests: Mapping[str, Any],
        caches: Sequence[KVCache],
        report: Report,
    ) -> None:
        """`requests`: the scheduler's."""
        self._sequences, self._requests, self._caches, self._report = sequences, requests, caches, report
        self._rows: dict[str, Row] = {}

    def launch(self, output: Any) -> Forward:
        """Take over new requests and blocks of vLLM's `SchedulerOutput`."""
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._put(new.req_id, new.block_ids, new.num_computed_tokens, 0)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                self._put(request_id, blocks, cached.num_computed_tokens[i], cached.num_output_tokens[i])
            elif blocks is not None:
                for table, more in zip(self._rows[request_id].tables, blocks, strict=True):
                    table.extend(more)
            row = self._rows[request_id]
            row.computed = min(row.computed, cached.num_computed_tokens[i])  # less, if a step was taken back
        forward = Forward(self._report.steps)
        for request_id, count in output.num_scheduled_tokens.items():
            row = self._rows[request_id]
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            forward.parts.append((request_id, row, [list(table) for table in row.tables], count, drafts))
        return forward

    def run(self, forward: Forward) -> None:
        for request_id, row, tables, count, drafts in forward.parts:
            if not forward.invalid.isdisjoint(tables[0][: -(-row.computed // BLOCK_TOKENS)]):
                garbage = rejected(row.sequence.digests[row.computed : row.computed + count])
                for cache in self._caches:
                    cache.write(tables, garbage, row.computed, row.replay_start)
                forward.sampled[request_id] = [0]
                self._report.taken_back += 1
                continue
            self._check(forward, request_id, row, tables)
            accepted = mix(row.known ^ mix(row.sequence.num_prompt_tokens)) % (drafts + 1)
            right = count - drafts + accepted
            digests = row.sequence.digests[row.computed : row.computed + count].copy()
            digests[right:] = rejected(digests[right:])
            for cache in self._caches:
                cache.write(tables, digests, row.computed, row.replay_start)
            row.computed += right
            forward.sampled[request_id] = []
            if row.computed >= row.known:
                forward.sampled[request_id] = row.sequence.tokens[row.known : row.known + accepted + 1]
                row.known += accepted + 1

    def _check(self, forward: Forward, request_id: str, row: Row, tables: list[list[int]]) -> None:
        for cache in self._caches:
            count, wrong = cache.check(tables, row.sequence.digests, row.computed, row.replay_start)
            self._report.token_reads += count
            self._report.wrong_reads += bool(wrong)
            for text in wrong:
                self._report.add(f"wrong read: step {forward.step}, {request_id}, {text}")

    def _put(self, request_id: str, blocks: Sequence[Sequence[int]], computed: int, outputs: int) -> None:
        sequence = self._sequences[request_id]
        tables = [list(table) for table in blocks]
        self._report.whole_hits += computed % BLOCK_TOKENS == BLOCK_TOKENS - 1
        known, replay_start = sequence.num_prompt_tokens + outputs, self._requests[request_id].replay_start
        self._report.replays += replay_start > 0
        self._rows[request_id] = Row(sequence, tables, computed, known, replay_start)

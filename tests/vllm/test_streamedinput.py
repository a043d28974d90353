"""Streamed requests, whose input comes in parts. vLLM answers each part, and keeps the request's blocks until the next
part comes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from tests.vllm.harness.run import Run
from tests.vllm.harness.sequence import VOCABULARY
from tests.vllm.harness.sequence import Sequence as TokenSequence
from tests.vllm.harness.setup import Setup
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

pytestmark = pytest.mark.vllm

_PATIENCE = 500  # steps for one part
_NAME = "streamed"


class Stream(Run):
    """vLLM's scheduler with the connector, and one streamed request."""

    def __init__(self, setup: Setup, patch: pytest.MonkeyPatch) -> None:
        super().__init__(setup, patch)
        self._random = Random(setup.name)

    def send(self, num_tokens: int) -> None:
        """Send the next part, and take its answer."""
        core, part = self._core, [self._random.randrange(VOCABULARY) for _ in range(num_tokens)]
        known = core.scheduler.requests.get(_NAME)
        before = [] if known is None else known.all_token_ids[: known.num_computed_tokens]
        core.sequences[_NAME] = TokenSequence([*before, *part], "", len(before) + num_tokens + 20)
        core.outputs[_NAME] = []
        core.scheduler.add_request(self._request(part, resumable=True))
        for _ in range(_PATIENCE):
            self.step_engine()
            if core.scheduler.requests[_NAME].status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                assert len(core.outputs[_NAME]) == 10
                return
        raise AssertionError("the part is not answered")

    def end(self) -> None:
        """No more parts will come. Look for wrong reads and leaks."""
        self._core.scheduler.add_request(self._request([0], resumable=False))
        for _ in range(_PATIENCE):
            self.step_engine()
            if not self._core.is_busy:
                self.finish()
                return
        raise AssertionError("the engine does not come to rest")

    def reset(self) -> None:
        """The weights have changed. vLLM says that it could not forget the request's own blocks."""
        assert not self._core.reset(preempt=False)

    @property
    def lookups(self) -> dict[str, int]:
        """Lookups by result."""
        results: dict[str, int] = self._host.engine.stats().lookups.results
        return results

    @property
    def num_stored(self) -> int:
        """Blocks that can be found in the pool."""
        return len(self._host.engine.blocks(limit=1000).blocks)

    def _request(self, part: list[int], *, resumable: bool) -> Request:
        return Request(
            request_id=_NAME,
            prompt_token_ids=part,
            sampling_params=SamplingParams(max_tokens=10, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._core.hasher,
            resumable=resumable,
        )


@pytest.fixture(
    params=[
        Setup("streamed"),
        Setup("streamed, async", asynchronous=True),
        Setup("streamed, hybrid, async", layers="hybrid", asynchronous=True, blocks=72),
    ],
    ids=lambda setup: setup.name,
)
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    stream = Stream(request.param, monkeypatch)
    yield stream
    stream.close()


def test_a_streamed_request_is_looked_up_once_and_stored(stream: Stream) -> None:
    for _ in range(3):
        stream.send(50)
    stream.end()
    assert stream.report.problems == []
    assert stream.lookups == {"full": 0, "partial": 0, "miss": 1}
    assert stream.num_stored >= 3 * 50 // 16


def test_what_a_streamed_request_had_before_a_reset_is_not_stored(stream: Stream) -> None:
    stream.send(50)
    stream.reset()
    stream.send(50)
    stream.end()
    assert stream.report.problems == []
    assert stream.num_stored == 0

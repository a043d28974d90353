"""What loads have saved an engine, from the load to the counters of its pool."""

from __future__ import annotations

import pytest
from tests.service.connectors.engine_core.vllmhost import ONE_GROUP, FakeRequest, VllmHost

from kvstow.stats import PrefillStats
from kvstow_service.connectors.engine_core.loadpolicy import LoadPath

PROMPT = "abcdefghijklmnopq"
PER_TOKEN = 0.5


def loading(path: LoadPath, local: int = 0) -> tuple[VllmHost, int]:
    """An engine that knows what prompts cost, and a load of all that its pool has of a request."""
    host = VllmHost(ONE_GROUP, gpu_blocks=199, slots=128, path=path)
    for number in range(9):
        request = FakeRequest(str(number), PROMPT if not number else f"{number}" * 16)
        plan = host.run(request)
        host.clock.advance(request.num_tokens * PER_TOKEN)
        host.side.step_ended(plan.number)
        host.finish(request)
        host.step()
        host.step()
    request = FakeRequest("again", PROMPT)
    hit = host.ask(request, local)
    assert hit
    host.admit(request, local=local, load=hit)
    return host, hit


def saved(host: VllmHost) -> PrefillStats:
    """After another step of others."""
    other = FakeRequest("other", "a")
    plan = host.run(other)
    host.side.step_ended(plan.number)
    return host.engine.stats().prefill


@pytest.mark.parametrize("path", ["async", "layer"])
@pytest.mark.parametrize("local", [0, 4])
def test_a_load_saves_the_tokens_between_the_end_of_the_gpus_hit_and_its_own_once(path: LoadPath, local: int) -> None:
    host, hit = loading(path, local)
    assert bool(host.step().layered.ops) == (path == "layer")
    host.side.settle()
    prefill = saved(host)
    assert hit == 16 - local
    assert prefill.hit_tokens == hit
    assert prefill.hit_seconds == pytest.approx(hit * PER_TOKEN)
    assert saved(host) == prefill


def test_a_failed_load_saves_nothing() -> None:
    host, _ = loading("async")
    (op,) = host.step(copy=False).loads.ops
    host.ranks[0].run(op.op_id, fail=True)
    host.side.settle()
    assert saved(host).hit_tokens == 0


def test_time_in_which_the_engine_had_nothing_but_a_load_is_no_gain() -> None:
    host, hit = loading("async")
    host.step(copy=False)
    host.clock.advance(3.0)
    host.copy()
    host.side.settle()
    prefill = saved(host)
    assert prefill.load_wait_seconds == pytest.approx(3.0)
    assert prefill.seconds_saved == pytest.approx(hit * PER_TOKEN - 3.0)

"""Two engines on one pool, and a router's index of each: it ends equal to what the pool has announced.

One engine stores at once, in small steps, so that much waits in its backlog; the other one stores lazily. The pool is
real, with its journal. Its answers come late.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.service.connectors.engine_core.router import Indexed, Router, indexed, make_feed
from tests.service.connectors.engine_core.vllmhost import FakeRequest, gpu_hashes, keys_of
from tests.service.connectors.vllm.attachedvllmhost import AttachedVllmHost
from tests.service.connectors.vllm.slowservice import SlowService

from kvstow.attach.calls import DescribeStore
from kvstow.config import EngineConfig
from kvstow.control.engine import PoolFacade
from kvstow.control.indexjournal import IndexJournal
from kvstow.control.sharedpool import SharedPool, recover
from kvstow_service.connectors.engine_core.controlplane import AttachedControl
from kvstow_service.connectors.engine_core.kvevents import AttachedBlocks, EventFeed
from kvstow_service.connectors.engine_core.stepplan import PlannedStep

SLOTS, GPU_BLOCKS = 40, 17
STEPS = 10_000
PROMPTS = [
    root + branch + leaf
    for root in ("abcdefgh", "ABCDEFGH")
    for branch in ("ijkl", "IJKL", "mn", "op")
    for leaf in ("qrst", "uv", "wx", "yz12")
]
EXPECTED: dict[bytes, Indexed] = {key: block for prompt in PROMPTS for key, block in indexed(prompt).items()}


def make_events(host: AttachedVllmHost, control: AttachedControl) -> EventFeed:
    return make_feed(AttachedBlocks(control, lambda: host.has_memory, host.clock))


class RoutedEngine(AttachedVllmHost):
    """An engine whose events a router follows."""

    def __init__(self, cluster: Cluster, *, is_lazy: bool) -> None:
        self.router, self._cluster = Router(), cluster
        self._number = 0
        service = SlowService(cluster.config, SLOTS, clock=cluster.clock, delay=cluster.delay, pool=cluster.pool)
        super().__init__(
            gpu_blocks=GPU_BLOCKS,
            lazy_blocks=6 if is_lazy else None,
            step_blocks=3,
            service=service,
            memory=cluster.memory,
            make_events=make_events,
        )

    def step(self, scheduled: dict[FakeRequest, int] | None = None, *, copy: bool = True) -> PlannedStep:
        self._cluster.steps += 1
        self._cluster.clock.advance(0.03)
        self.clock.advance(0.03)
        plan = super().step(scheduled, copy=copy)
        assert self.events is not None
        self.router.follow(self.events.take_events())
        return plan

    def serve(self, prompt: str, chance: random.Random) -> None:
        """A request from its arrival to its end, by whatever way. It may be preempted, and its copies may fail."""
        self._number += 1
        request = FakeRequest(str(self._number), prompt)
        self.expect(request)
        local = self._cached(prompt)
        load = self.answer(request, local)
        if load and self._cached(prompt) == local:
            self.admit(request, local=local, load=load)
            self.step()
            self.settle()
            self.resume(request, 1, computed=local + load if self.has_loaded(request, local + load) else local)
            self.step({request: 1})
        elif self._cached(prompt) == local:
            self.admit(request, 2, local=local)
            self.step({request: 2})
        else:  # the answer took so long that the GPU has other blocks by now
            self.finish(request)
            return
        if chance.random() < 0.1:
            self.preempt(request)
            self.step()
            self.finish(request)
            return
        while (left := request.num_tokens - request.num_computed_tokens) > 0:
            self.step({request: min(left, chance.choice((2, 4, 20)))})
        if chance.random() < 0.3:
            self.step({request: 0}, copy=chance.random() < 0.5)
        self.finish(request)

    def _cached(self, prompt: str) -> int:
        """The prompt's tokens that the GPU has: all but the last block's at most."""
        hashes = gpu_hashes(prompt)[: (len(prompt) - 1) // 2]
        return 2 * next((at for at, one in enumerate(hashes) if self.pool.cached(one) is None), len(hashes))

    def come_to_rest(self) -> None:
        for _ in range(300):
            assert self.events is not None
            is_busy = self.side.has_pending_stores or self.events.is_behind
            if self.control.is_attached and self.has_memory and not is_busy:
                break
            self.step()
        else:
            raise AssertionError("the engine does not come to rest")
        for _ in range(12):  # what others have stored and removed is read ten times a second
            self.step()


class Cluster:
    """The pool, and its two engines."""

    def __init__(self, seed: int) -> None:
        self.chance, self.steps = random.Random(seed), 0
        self.config = EngineConfig(slot_bytes=64, capacity_slots=SLOTS)
        self.clock = FakeClock()
        self.memory: dict[int, bytes | None] = {}
        self.journal = IndexJournal.create(SLOTS, {})
        self.pool = self._make_pool()
        self.engines = [RoutedEngine(self, is_lazy=is_lazy) for is_lazy in (False, True)]

    def close(self) -> None:
        self.journal.close()

    def delay(self) -> int:
        return self.chance.choice((1, 1, 2, 3))

    def _make_pool(self) -> SharedPool:
        pool = SharedPool(self.config, clock=self.clock, journal=self.journal)
        pool.add_extent(SLOTS)
        pool.set_populated(SLOTS)
        return pool

    def restart_service(self) -> None:
        """The service dies, and another one recovers the blocks of its journal. Nobody has copies under way."""
        for engine in self.engines:
            engine.copy()
            engine.service.lose()
        names = {one.tag: one.name for one in self.pool.index.namespaces}
        fd = os.dup(self.journal.fd)
        self.journal.close()
        self.journal = IndexJournal.open(fd)
        found = self.journal.recover()
        self.pool = self._make_pool()
        recover(self.pool, found, names, [])
        for engine in self.engines:
            engine.service.use(self.pool)
            engine.ranks[0].engine.pool = self.pool

    def restart_engines(self) -> None:
        """After a reset an engine shares nothing with others until it has started anew."""
        for engine in self.engines:
            engine.copy()
            engine.service.lose()
        self.engines = [RoutedEngine(self, is_lazy=is_lazy) for is_lazy in (False, True)]

    def purge(self, prompt: str | None) -> None:
        facade = PoolFacade(self.pool)
        purge = facade.admin.purge(everything=True) if prompt is None else facade.admin.purge(keys=keys_of(prompt))
        assert purge.run().finished

    def visible(self, engine: RoutedEngine) -> set[bytes]:
        assert engine.service.session is not None
        session = engine.service.session
        return {key for key in EXPECTED if session.namespace.keys.get(key) is not None}

    def announced(self, engine: RoutedEngine) -> set[bytes]:
        """What the log of this pool says is there, read from its first event."""
        assert engine.service.session is not None
        tag, found = engine.service.session.namespace.tag, set[bytes]()
        page = self.pool.events.read(0, 1 << 20)
        assert not page.lost
        for event in page.events:
            if event.namespace == tag:
                (found.update if event.kind == "stored" else found.difference_update)(event.keys)
        return found

    def check(self) -> None:
        last = -1
        while last != (last := self.pool.events.last_sequence):  # an engine may store more while another one rests
            for engine in self.engines:
                engine.come_to_rest()
        PoolFacade(self.pool).check_integrity()
        for engine in self.engines:
            known, there = engine.router.blocks, self.visible(engine)
            assert known == {key: EXPECTED[key] for key in known}, "tokens, parents and media are right"
            assert known.keys() <= there, "nothing is announced that the pool does not have"
            assert self.announced(engine) <= known.keys(), "all that was stored in this life of the pool is announced"
        num_visible = sum(len(one.keys) for one in self.pool.index.namespaces)
        assert len(self.pool.events.descriptions) <= num_visible, "what was removed is forgotten"

    def use_all(self) -> None:
        """Requests use all that the pool has, also what it has recovered."""
        for engine in self.engines:
            for prompt in PROMPTS:
                for block in engine.pool.blocks:
                    if not block.ref_cnt:
                        block.block_hash = None
                if self.visible(engine) - engine.router.blocks.keys():
                    engine.serve(prompt, random.Random(0.5))
                    engine.come_to_rest()

    def act(self) -> None:
        chance = self.chance
        engine, what = chance.choice(self.engines), chance.random()
        if what < 0.80:
            engine.serve(chance.choice(PROMPTS), chance)
        elif what < 0.86:
            self.purge(chance.choice([*PROMPTS, None]))
        elif what < 0.90:
            engine.service.lose()
            engine.step()
        elif what < 0.93:
            engine.service.die()
            engine.step()
        elif what < 0.96:
            self.restart_service()
        elif what < 0.97:
            engine.side.reset()
            for _ in range(5):
                engine.serve(chance.choice(PROMPTS), chance)
            self.check()
            self.restart_engines()
        else:
            self.pool.acceptance.set_bypass(load=False, store=chance.random() < 0.5, until=self.clock() + 0.5)
        for _ in range(chance.choice((0, 0, 1, 4))):
            chance.choice(self.engines).step()


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_routers_index_ends_equal_to_what_the_pool_has_announced(cluster: Cluster) -> None:
    while cluster.steps < STEPS:
        for _ in range(cluster.chance.choice((1, 3, 10))):
            cluster.act()
        cluster.check()
    cluster.use_all()
    cluster.check()
    for engine in cluster.engines:
        assert engine.router.blocks.keys() == cluster.visible(engine)


@pytest.mark.parametrize("is_on", [True, False], ids=["events", "no events"])
def test_without_events_nothing_is_described_sent_or_kept(monkeypatch: pytest.MonkeyPatch, *, is_on: bool) -> None:
    host = AttachedVllmHost(make_events=make_events if is_on else None)
    sent: list[type] = []
    send = host.service.connection.send

    def noted(message: Any, fds: object = ()) -> bool:
        sent.append(type(message))
        return send(message, fds)

    monkeypatch.setattr(host.service.connection, "send", noted)
    request = FakeRequest("r", PROMPTS[0])
    host.run(request)
    host.step({request: 0})
    host.finish(request)
    host.settle()
    assert host.stored() == set(keys_of(PROMPTS[0]))
    assert (DescribeStore in sent) is is_on
    assert (len(host.service.pool.events.descriptions) > 0) is is_on

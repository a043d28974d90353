"""The node service's own sessions, which move blocks to and from the fleet tier, beside those of engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.engine.control.sharedhost import Client, Host

from kvstow.control.indexjournal import IndexJournal
from kvstow.control.tiertraffic import TierTraffic
from kvstow.messages import TierCompletion, TierOp

KEYS = [bytes([100 + number]) for number in range(8)]

pytestmark = pytest.mark.usefixtures("no_log_lines")


class Tier:
    """The tier's session in the namespace of an engine. Its transfers move everything when the test says so."""

    def __init__(self, host: Host, client: Client) -> None:
        self.session = host.pool.attach_tier(client.session.namespace)
        self.session.map_memory("transfers")
        self.session.set_registered(host.pool.capacity, host.pool.desired.number)
        self.traffic = TierTraffic(self.session, most=64)

    def fetch(self, keys: Sequence[bytes]) -> list[TierOp]:
        return self.traffic.begin_fetch("f", keys)

    def finish(self, ops: Sequence[TierOp]) -> None:
        for op in ops:
            for rank in range(len(self.session.ranks)):
                done = TierCompletion(op.op_id, "done", moved=len(op.keys))
                self.session.complete(rank, self.session.boot_id, [done])


def end(host: Host, client: Client) -> None:
    client.session.lose("closed")
    host.kill(client)


def test_nothing_is_fetched_into_a_namespace_that_is_forgotten() -> None:
    host = Host()
    gone = host.attach(namespace="a")
    tier = Tier(host, gone)
    end(host, gone)
    assert host.pool.namespaces() == []
    tier.finish(tier.fetch(KEYS[:3]))
    client = host.attach(namespace="b")  # has the number of the other one now
    assert host.counts["free"] == 8
    client.store(KEYS)
    assert host.counts["cached"] == 8
    assert host.pool.admin.purge(everything=True).run().evicted_slots == 8


def test_nothing_is_fetched_into_a_namespace_that_is_dropped() -> None:
    host = Host()
    gone = host.attach(namespace="a")
    gone.store(KEYS[:2])
    tier = Tier(host, gone)
    end(host, gone)
    host.pool.drop_namespace("a")
    assert tier.fetch(KEYS[2:4]) == []
    assert host.counts["cached"] == 2


def test_what_is_fetched_when_the_last_engine_ends_is_there_for_the_next_one() -> None:
    host = Host()
    gone = host.attach(namespace="a")
    tier = Tier(host, gone)
    ops = tier.fetch(KEYS[:3])
    end(host, gone)
    tier.finish(ops)
    tier.finish(tier.fetch(KEYS[3:4]))
    assert host.attach(namespace="a").session.lookup(KEYS) == 4
    assert host.counts["cached"] == 4


@pytest.mark.parametrize("keys", [[b"k", b"longer"], [bytes(41)]], ids=["of two lengths", "too long"])
def test_keys_that_do_not_fit_into_the_journal_are_not_fetched(keys: list[bytes]) -> None:
    journal = IndexJournal.create(8, {})
    journal.reserve(0, 8)
    host = Host(journal=journal)
    tier = Tier(host, host.attach())
    tier.finish(tier.fetch(keys))
    assert host.counts["free"] == 8
    tier.finish(tier.fetch(KEYS[:2]))
    assert host.counts["cached"] == 2
    journal.close()

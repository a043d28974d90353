"""The end of a tier, and the next one of its session."""

from __future__ import annotations

from tests.engine.control.fleettier.tierednode import KEYS, TieredNode

from kvstow.control.fleettier import FleetTier
from kvstow.control.tiersettings import TierSettings
from kvstow.control.tierswitch import CLOSED
from kvstow.testing.fakes import FakeClock


def test_a_closed_tier_begins_nothing_and_nobody_waits_for_it(node: TieredNode) -> None:
    node.add(KEYS[:3])
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    node.store(KEYS[6:8])
    node.fleet.close()
    assert node.fleet.is_over(wait)
    assert wait.state == "over", "a host that looks at it answers the request once"
    node.fleet.step()
    assert node.ops("put") == []
    assert node.fleet.look_for(KEYS[3:5]) is None
    traffic = node.fleet.traffic
    begun = [
        *traffic.begin_fetch("f", KEYS[8:9]),
        *traffic.begin_put("f", KEYS[6:7]),
        *traffic.put_coldest("f", 12, (), most=12),
    ]
    assert begun == [], "an op began after the end"
    assert (node.fleet.status().state, node.fleet.status().reason) == ("off", CLOSED)


def test_ops_of_the_tier_that_a_session_had_before_do_not_confuse_the_next_one(
    node: TieredNode, clock: FakeClock
) -> None:
    node.add(KEYS[:3])
    assert not node.fleet.is_over(node.look(KEYS[:3]))
    assert node.fleet.traffic.in_flight == 1
    node.fleet.close()
    node.run_all()
    assert node.fleet.traffic.in_flight == 0
    node.fleet = FleetTier(node.offload, node.store_of_names.open_lookups(), TierSettings(), "f", clock=clock)
    node.tier = node.fleet.traffic
    node.fleet.step()
    assert node.fleet.status().counters.fetched_blocks == 0
    node.store(KEYS[4:6])
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == [tuple(KEYS[4:6])]

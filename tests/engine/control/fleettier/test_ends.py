"""The end of a tier, and tiers that are off."""

from __future__ import annotations

from tests.engine.control.fleettier.tierednode import KEYS, MakeNode, TieredNode


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
    begun = [*traffic.begin_fetch("f", KEYS[8:9]), *traffic.begin_put("f", KEYS[6:7])]
    assert begun == [], "an op began after the end"
    assert node.fleet.status().state == "off"


def test_a_tier_that_was_never_on_says_why(make_node: MakeNode) -> None:
    node = make_node(off_reason="hashes are random")
    status = node.fleet.status()
    assert (status.state, status.reason) == ("off", "hashes are random")
    assert node.fleet.look_for(KEYS) is None


def test_a_tier_that_is_turned_off_begins_nothing_and_says_why(node: TieredNode) -> None:
    node.add(KEYS[:3])
    node.store(KEYS[6:8])
    node.fleet.turn_off("a defect")
    node.fleet.step()
    assert node.ops("put") == []
    assert node.fleet.look_for(KEYS[:3]) is None
    assert (node.fleet.status().state, node.fleet.status().reason) == ("off", "a defect")

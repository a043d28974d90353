"""What operators order while a tier is in use."""

from __future__ import annotations

from tests.engine.control.fleettier.tierednode import KEYS, TieredNode


def test_an_operator_can_switch_it_off_and_on(node: TieredNode) -> None:
    node.add(KEYS[:3])
    node.fleet.set_bypassed(True)
    node.store(KEYS[4:6])
    node.hear()
    assert node.ops("put") == []
    assert node.fleet.look_for(KEYS[:3]) is None
    assert node.fleet.status().counters.requests == 0, "it was looked at"
    assert node.fleet.status().state == "bypassed"
    node.fleet.set_bypassed(False)
    assert node.fetch_all(KEYS[:3])
    assert node.fleet.status().state == "on"


def test_a_bypass_ends_when_its_time_is_over(node: TieredNode) -> None:
    node.add(KEYS[:3])
    node.fleet.set_bypassed(True, 60.0)
    assert node.fleet.look_for(KEYS[:3]) is None
    node.clock.advance(59.0)
    assert node.fleet.status().state == "bypassed"
    node.clock.advance(1.0)
    assert node.fleet.status().state == "on"
    assert node.fetch_all(KEYS[:3])


def test_what_waited_to_be_put_when_the_bypass_began_is_not_put_after_it(node: TieredNode) -> None:
    node.store(KEYS[:3])
    node.fleet.set_bypassed(True)
    node.fleet.step()
    node.fleet.set_bypassed(False)
    node.fleet.step()
    assert node.ops("put") == []
    node.store(KEYS[3:4])
    node.fleet.step()
    assert [op.keys for op in node.ops("put")] == [tuple(KEYS[3:4])]


def test_weights_that_an_operator_names_are_used_from_the_next_step_on(node: TieredNode) -> None:
    node.fleet.reset()
    node.fleet.name_weights("g")
    assert node.fleet.status().reason == "an operator has named the weights: it begins with the engine's next step"
    assert node.fleet.look_for(KEYS[:3]) is None
    node.fleet.step()
    assert (node.fleet.fingerprint, node.fleet.status().state) == ("g", "on")
    node.add(KEYS[:3], "g")
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    assert node.ops("fetch")[0].fingerprint == "g"


def test_a_name_from_before_another_reset_is_that_of_weights_that_are_gone(node: TieredNode) -> None:
    node.fleet.reset()
    node.fleet.name_weights("g")
    node.fleet.reset()
    node.fleet.step()
    assert node.fleet.fingerprint is None


def test_weights_that_have_a_name_keep_it(node: TieredNode) -> None:
    """Else blocks that were computed with them would be put under the new one."""
    node.fleet.name_weights("g")
    node.fleet.step()
    assert node.fleet.fingerprint == "f"


def test_the_last_name_that_an_operator_gives_counts(node: TieredNode) -> None:
    node.fleet.reset()
    node.fleet.name_weights("g")
    node.fleet.name_weights("h")
    node.fleet.step()
    assert node.fleet.fingerprint == "h"


def test_after_a_purge_the_store_is_asked_again(node: TieredNode) -> None:
    node.look(KEYS[:1])
    assert node.fleet.look_for(KEYS[:1]) is None, "the answer is known"
    node.fleet.note_purged()
    node.fleet.step()
    node.look(KEYS[:1])
    assert node.fleet.status().counters.lookups == 2


def test_what_was_stored_during_a_bypass_is_not_put_after_it(node: TieredNode) -> None:
    node.fleet.set_bypassed(True)
    node.store(KEYS[:3])
    node.fleet.set_bypassed(False)
    node.fleet.step()
    assert node.ops("put") == []

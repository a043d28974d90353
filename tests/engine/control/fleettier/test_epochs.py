"""Weights that change: nothing of former ones is put, fetched or found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.control.fleettier.tierednode import KEYS, MakeNode, TieredNode

from kvstow.control.fleettier import FleetTier
from kvstow.control.tiertraffic import TierTraffic
from kvstow.tier.fingerprint import WEIGHTS_CHANGED


def epoch_scenario(node: TieredNode) -> None:
    """The weights change while a fetch is under way, and something waits to be put."""
    node.add(KEYS[:3])
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    node.store(KEYS[6:8])
    node.fleet.reset()
    node.offload.admin.purge(everything=True).run()
    node.run_all()
    node.fleet.step()
    assert node.fleet.is_over(wait)
    assert node.engine.lookup(KEYS) == 0, "a fetch from before the new weights is visible"
    status = node.fleet.status()
    assert (status.state, status.reason) == ("off", WEIGHTS_CHANGED)
    node.fleet.reset("they are being loaded")
    assert node.fleet.status().reason == "they are being loaded"
    node.store(KEYS[8:10])
    node.fleet.step()
    assert node.ops("put") == [], "a block of weights without a name was put"
    assert node.fleet.look_for(KEYS[:3]) is None
    asked = len(node.store_of_names.batches)
    node.fleet.begin_epoch("g")
    node.store(KEYS[10:])
    node.fleet.step()
    assert [(op.fingerprint, op.keys) for op in node.ops("put")] == [("g", tuple(KEYS[10:]))]
    assert not node.fetch_all(KEYS[:3]), "an object of the old weights was fetched"
    assert len(node.store_of_names.batches) == asked + 1
    node.run_all()
    node.fleet.step()
    node.offload.check_integrity()


def test_a_fresh_epoch_neither_puts_nor_fetches_until_its_weights_have_a_name(node: TieredNode) -> None:
    epoch_scenario(node)


def epochs_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetTier, "reset", lambda self, reason="": None)


def fetches_outlive_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TierTraffic, "cancel_fetches", lambda self: 0)


def test_a_tier_that_was_never_on_says_why(make_node: MakeNode) -> None:
    node = make_node(off_reason="hashes are random")
    status = node.fleet.status()
    assert (status.state, status.reason) == ("off", "hashes are random")
    assert node.fleet.look_for(KEYS) is None


def test_a_request_that_asks_while_another_fetches_waits_for_nothing_after_a_reset(node: TieredNode) -> None:
    node.add(KEYS[:5])
    assert not node.fleet.is_over(node.look(KEYS[:3]))
    node.store_of_names.lookups.shut()
    wait = node.fleet.look_for(KEYS[:5])
    assert wait is not None
    node.fleet.reset()
    assert node.fleet.is_over(wait)
    node.fleet.begin_epoch("g")
    other = node.fleet.look_for(KEYS[:3])
    assert other is not None
    node.store_of_names.lookups.open()
    node.hear()
    assert node.fleet.is_over(other), "it waits for a fetch of other bytes"


def test_a_reset_stops_fetches_under_way(node: TieredNode) -> None:
    node.add(KEYS[:3])
    wait = node.look(KEYS[:3])
    assert not node.fleet.is_over(wait)
    node.fleet.reset()
    node.run_all()
    assert node.engine.lookup(KEYS[:3]) == 0


@pytest.mark.parametrize("mutate", [epochs_are_ignored, fetches_outlive_a_reset])
def test_an_epoch_that_is_ignored_is_noticed(
    node: TieredNode, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_reset_stops_fetches_under_way(node)


def test_what_was_to_be_put_before_a_reset_is_not_put_under_the_new_name(node: TieredNode) -> None:
    node.store(KEYS[:2])
    node.fleet.reset()
    node.fleet.begin_epoch("g")
    node.fleet.step()
    assert node.ops("put") == []


def test_a_put_from_before_a_reset_says_nothing_of_the_new_objects(node: TieredNode) -> None:
    node.store(KEYS[:2])
    node.fleet.step()
    assert len(node.ops("put")) == 1
    node.fleet.reset()
    node.offload.admin.purge(everything=True).run()
    node.fleet.begin_epoch("g")
    node.run_all()
    node.fleet.step()
    assert not node.fetch_all(KEYS[:2])
    assert node.store_of_names.batches == [("exists", 2)], "it has none under the new name"

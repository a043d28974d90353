"""What is fetched for a request of a model with several KV groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.engine.control.fleettier.tierednode import KEYS, MakeNode, TieredNode

from kvstow.results import Needed

FULL, WINDOW = KEYS[:6], KEYS[6:]


class FullAndWindow:
    """A hit of n blocks needs the first n blocks of one group, and the n-th block of the other one."""

    most = 6

    def __call__(self, has: Callable[[Sequence[bytes]], Sequence[bool]], most: int | None = None) -> Needed:
        full, window = has(FULL), has(WINDOW)
        for number in range(self.most if most is None else most, 0, -1):
            if all(full[:number]) and window[number - 1]:
                return Needed(hit_of(number), number)
        return Needed((), 0)


def hit_of(number: int) -> list[bytes]:
    return [*FULL[:number], *WINDOW[number - 1 : number]]


def fetch(node: TieredNode) -> list[bytes]:
    """The keys that are fetched when a request comes."""
    wait = node.fleet.look_for(KEYS, 0, FullAndWindow())
    assert wait is not None
    node.hear()
    node.fleet.is_over(wait)
    keys = [key for op in node.ops("fetch") for key in op.keys]
    node.run_all()
    node.fleet.step()
    assert node.fleet.is_over(wait)
    return keys


def store_and_put(node: TieredNode, keys: list[bytes]) -> None:
    """Without puts under way afterwards, which hold slots."""
    node.store(keys)
    node.fleet.step()
    node.run_all()
    node.fleet.step()


def visible_blocks(node: TieredNode) -> int:
    node.offload.check_integrity()
    return FullAndWindow()(node.engine.contains).blocks


@pytest.mark.parametrize(("slots", "blocks"), [(7, 6), (6, 5), (5, 4), (2, 1), (1, 0)])
def test_a_fetch_is_cut_to_a_hit_that_the_pool_has_room_for(make_node: MakeNode, slots: int, blocks: int) -> None:
    node = make_node(slots)
    node.add(KEYS)
    assert fetch(node) == (hit_of(blocks) if blocks else [])
    assert visible_blocks(node) == blocks


def test_lengths_that_are_no_hit_are_passed_over(make_node: MakeNode) -> None:
    node = make_node(6)
    node.add([*FULL, WINDOW[1], WINDOW[5]])
    assert fetch(node) == hit_of(2)
    assert visible_blocks(node) == 2


def test_blocks_that_others_hold_make_no_room(make_node: MakeNode) -> None:
    node = make_node(8)
    others = [bytes([1, 0, number]) for number in range(5)]
    store_and_put(node, others)
    lease = node.engine.acquire(others[:3])
    node.add(KEYS)
    assert fetch(node) == hit_of(4)
    assert visible_blocks(node) == 4
    node.engine.release_lease(lease)


def test_blocks_of_the_hit_itself_make_no_room(make_node: MakeNode) -> None:
    node = make_node(5)
    store_and_put(node, [*FULL[:2], WINDOW[1]])
    node.add(KEYS)
    assert visible_blocks(node) == 2
    assert fetch(node) == [*FULL[2:4], WINDOW[3]]
    assert visible_blocks(node) == 4


def test_none_of_a_hit_is_fetched_when_its_slots_were_taken_since_the_tier_looked(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(5)
    node.add(KEYS)
    monkeypatch.setattr(node.tier, "has_room", lambda keys: True)
    assert fetch(node) == []
    assert node.offload.stats().pool.slots.free == 5


def test_all_or_none_of_some_keys_are_fetched(make_node: MakeNode) -> None:
    node = make_node(4)
    node.store(KEYS[:1])
    assert not node.tier.begin_fetch("f", KEYS[:5], whole=True)
    assert node.offload.stats().pool.slots.free == 3
    node.offload.check_integrity()
    (op,) = node.tier.begin_fetch("f", KEYS[:4], whole=True)
    assert list(op.keys) == KEYS[1:4]
    node.run_all()

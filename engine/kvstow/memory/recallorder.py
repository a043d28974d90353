"""Which rows pools lose when others need memory, and in which order."""

from __future__ import annotations

from collections.abc import Mapping

from kvstow.memory.poolrows import BookedPool


def recall_order(
    pools: Mapping[str, BookedPool], shares: Mapping[str, int], *, may_cross: bool
) -> list[tuple[str, int]]:
    """Pools and numbers of rows that may be recalled: those of pools without sessions, which have no share, then those
    of the largest pool that is above its share, and so on. `may_cross`: also the row with which a pool falls below."""
    idle = sorted((pool.idle_since, name) for name, pool in pools.items() if name not in shares)
    order = [(name, row) for _, name in idle for row in reversed(pools[name].active_rows())]
    held = {name: pools[name].held_bytes() for name in shares}
    rows = {name: pools[name].active_rows() for name in shares}

    def may_lose_a_row(name: str) -> bool:
        if not rows[name]:
            return False
        if may_cross:
            return held[name] > shares[name]
        return held[name] - pools[name].rows[rows[name][-1]].num_bytes >= shares[name]

    while losers := [name for name in shares if may_lose_a_row(name)]:
        largest = max(losers, key=lambda name: (held[name], name))
        row = rows[largest].pop()
        held[largest] -= pools[largest].rows[row].num_bytes
        order.append((largest, row))
    return order

"""Hints on a small trace of agents, in a real control plane: what right ones bring, and what wrong ones cost."""

from __future__ import annotations

from bench import retention

from kvstow_service.replay.hittable import foresight_hits


def test_right_hints_come_near_the_optimum_and_wrong_ones_cost_nothing() -> None:
    requests = retention.agents(16, 900.0, others=False)
    blocks, slots = sum(len(request.blocks) for request in requests), retention.working_set(requests) // 2
    optimum = foresight_hits([request.blocks for request in requests], slots)
    hits = {
        name: retention.replay(requests, slots, say).hits
        for name, say in (("none", retention.silent), *retention.CLIENTS.items())
        if name in ("none", "exact", "sigma 1", "50% wrong")
    }
    assert hits["none"] < 0.9 * optimum
    assert hits["exact"] >= 0.94 * optimum, "each announced time is a class that has to learn from 682 requests"
    assert hits["sigma 1"] >= 0.9 * optimum
    assert hits["50% wrong"] >= hits["none"] - 0.005 * blocks

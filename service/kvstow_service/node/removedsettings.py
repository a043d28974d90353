"""Settings that `kvstow serve` once had, and what to use now."""

from __future__ import annotations

_REPLAY = "run `kvstow replay TRACE --attach unix:PATH` beside the service"
_ENGINES = "each engine that attaches brings its own"
_PACE = "use --pin-chunk and --pin-pause for populating; engines pace the registering of memory themselves"

REMOVED_SETTINGS = {
    "pool_size": "use --memory, for all engines and ranks of this node together",
    "pool_max_size": "use --memory: pools grow within it as their engines ask",
    "ranks": f"{_ENGINES} ranks",
    "device": f"{_ENGINES} devices; the service uses none",
    "slot_size": f"{_ENGINES} slot size",
    "shape": f"{_ENGINES} KV cache layout",
    "copy_strategy": f"{_ENGINES} way of copying",
    "kv_blocks": f"{_ENGINES} KV cache",
    "lock": "engines lock the memory when they register it",
    "pin_pace": _PACE,
    "pin_latency_target": _PACE,
    "replay": _REPLAY,
    "replay_requests": f"{_REPLAY}, with --requests",
    "replay_concurrency": f"{_REPLAY}, with --concurrency",
    "replay_rate": f"{_REPLAY}, with --rate",
    "replay_time_scale": f"{_REPLAY}, with --time-scale",
    "exit_after_replay": _REPLAY,
}
"""By name: the end of a sentence that begins with "is no longer a setting: "."""

"""Sessions in the form of kv-cache-tester, made up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

BLOCK = 64
MODEL = "model-a"


def turn(t: float, tokens: int, **fields: Any) -> dict[str, Any]:
    """A request whose ids count from 1."""
    ids = list(range(1, tokens // BLOCK + 1))
    values = {"t": t, "type": "n", "model": MODEL, "in": tokens, "out": 10, "hash_ids": ids, "stop": "tool_use"}
    return {**values, "api_time": 2.0, **fields}


def session(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    values = {"id": "x", "models": [MODEL], "block_size": BLOCK, "hash_id_scope": "local"}
    return {**values, "tool_tokens": 1000, "system_tokens": 100, "requests": list(requests), **fields}


def write(path: Path, value: dict[str, Any]) -> Path:
    path.write_text(json.dumps(value))
    return path


def agents(folder: Path, count: int, *, turns: int = 12, seed: int = 0) -> Path:
    """Sessions of coding agents, as large as a test needs them: pauses of seconds after tool calls, of minutes after
    answers; prompts that grow, and are cut now and then."""
    choose = random.Random(seed)
    folder.mkdir(exist_ok=True)
    for number in range(count):
        t, fresh = 0.0, 1
        ids: list[int] = []
        requests = []
        for _ in range(choose.randint(2, 2 * turns)):
            if len(ids) > 600 and choose.random() < 0.2:
                del ids[100:]
            grown = choose.randint(10, 120)
            ids += range(fresh, fresh + grown)
            fresh += grown
            stop = "tool_use" if choose.random() < 0.8 else "end_turn"
            seconds = choose.uniform(1, 20)
            requests.append(turn(t, BLOCK * len(ids), hash_ids=list(ids), stop=stop, api_time=seconds))
            t += seconds + choose.expovariate(1 / 10 if stop == "tool_use" else 1 / 300)
        write(folder / f"session_{number:03}.json", session(*requests))
    return folder

"""An engine as another user or in another cgroup. Prints what it saw as JSON, then waits to be killed.

`python isolatedengine.py SOCKET [--uid UID] [--group GID] [--cgroup FILE] [--weights NAME] [--forge] [--store N]
[--find N] [--wait] [--map BYTES] [--one-rank] [--leave]`

`--forge`: the bytes of its blocks are not those that other engines expect. `--wait`: until all are found. `--leave`: it
detaches, and keeps the memory that it has mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from msgspec.structs import replace
from tests.service.node import rawengine
from tests.service.node.rawengine import HELLO, POOL, SLOT_BYTES, RawEngine, key_of

from kvstow.attach.calls import Detach
from kvstow.attach.connection import AttachConnection
from kvstow.attach.hello import Hello
from kvstow.attach.identity import FleetWeights

_MADV_POPULATE_READ = 22


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("--uid", type=int)
    parser.add_argument("--group", type=int)
    parser.add_argument("--cgroup", type=Path)
    parser.add_argument("--weights", default="")
    for switch in ("--forge", "--wait", "--one-rank", "--leave"):
        parser.add_argument(switch, action="store_true")
    for number in ("--store", "--find", "--map"):
        parser.add_argument(number, type=int, default=0)
    options = parser.parse_args()
    if options.cgroup:
        options.cgroup.write_text(str(os.getpid()))
    if options.uid is not None:
        os.setgroups([] if options.group is None else [options.group])
        os.setgid(options.uid)
        os.setuid(options.uid)
    if options.forge:
        true_content = rawengine.content_of
        rawengine.content_of = lambda key, rank: true_content(key[::-1], rank)
    pool = replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1) if options.one_rank else POOL
    hello = replace(HELLO, pid=os.getpid(), pool=pool, fleet_weights=FleetWeights(options.weights))
    problem = problem_of(options.socket, hello)
    if problem is not None:
        print(json.dumps({"problem": problem}), flush=True)
        return
    engine = RawEngine(options.socket, hello)
    seen = use(engine, options)
    if options.leave:
        for worker in engine.workers:
            worker.connection.close(Detach("it keeps its memory all the same"))
        engine.scheduler.close()
    print(json.dumps(seen), flush=True)
    while not options.leave:
        engine.step()
    while True:
        time.sleep(60)


def problem_of(path: Path, hello: Hello) -> str | None:
    """Why it cannot attach."""
    first = AttachConnection(path, lambda: hello)
    deadline = time.monotonic() + 60
    while first.state != "attached" and "denied" not in str(first.problem) and time.monotonic() < deadline:
        first.poll(0.01)  # a busy service may need more than one attempt
    problem = first.problem
    first.close()
    return problem


def use(engine: RawEngine, options: argparse.Namespace) -> dict[str, object]:
    engine.store_all([key_of(10**6 + os.getpid())])  # then its ranks have registered memory
    if options.store:
        engine.store_all([key_of(number) for number in range(options.store)])
    keys, found = [key_of(number) for number in range(options.find)], 0
    if options.wait:
        engine.wait_for(lambda: engine.load(keys) == len(keys))
    if options.find:
        found = engine.load(keys)
    if options.map:
        engine.wait_for(lambda: all(sum(worker.populated.values()) >= options.map for worker in engine.workers))
        for worker in engine.workers:
            for memory in worker.maps.values():
                memory.madvise(_MADV_POPULATE_READ)
    return {"problem": None, "session": engine.welcome.session_id, "pool": engine.welcome.pool, "found": found}


if __name__ == "__main__":
    main()

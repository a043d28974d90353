"""An engine as another user or in another cgroup. Prints what it saw as JSON, then waits to be killed.

`python isolatedengine.py SOCKET [--uid UID] [--group GID] [--cgroup FILE] [--store N] [--find N] [--map BYTES]`
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from msgspec.structs import replace
from tests.service.node.rawengine import HELLO, RawEngine, key_of

from kvstow.attach.connection import AttachConnection
from kvstow.attach.hello import Hello

_MADV_POPULATE_READ = 22


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("--uid", type=int)
    parser.add_argument("--group", type=int)
    parser.add_argument("--cgroup", type=Path)
    for number in ("--store", "--find", "--map"):
        parser.add_argument(number, type=int, default=0)
    options = parser.parse_args()
    if options.cgroup:
        options.cgroup.write_text(str(os.getpid()))
    if options.uid is not None:
        os.setgroups([] if options.group is None else [options.group])
        os.setgid(options.uid)
        os.setuid(options.uid)
    hello = replace(HELLO, pid=os.getpid())
    problem = problem_of(options.socket, hello)
    if problem is not None:
        print(json.dumps({"problem": problem}), flush=True)
        return
    engine = RawEngine(options.socket, hello)
    print(json.dumps(use(engine, options)), flush=True)
    while True:
        engine.step()


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
    found = engine.load([key_of(number) for number in range(options.find)]) if options.find else 0
    if options.map:
        engine.wait_for(lambda: all(sum(worker.populated.values()) >= options.map for worker in engine.workers))
        for worker in engine.workers:
            for memory in worker.maps.values():
                memory.madvise(_MADV_POPULATE_READ)
    return {"problem": None, "pool": engine.welcome.pool, "found": found}


if __name__ == "__main__":
    main()

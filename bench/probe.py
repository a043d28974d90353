"""One measurement in a process of its own, in the virtual environment of its subject: prints JSON as its last line.

`python -m bench.probe SUBJECT SLOTS [TRACE]`; with a trace it is replayed, without the operations are timed.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from bench.subject import Subject, measure, replay


def make_subject(name: str, slots: int) -> Subject:
    """`vllm`, or `kvstow-POLICY-RANKS`."""
    if name == "vllm":
        from bench.vllm_subject import BlockPoolSubject

        return BlockPoolSubject(slots)
    from bench.kvstow_subject import EngineSubject

    _, policy, ranks = name.split("-")
    return EngineSubject(slots, policy=policy, ranks=int(ranks))


def main(name: str, slots: int, trace: str | None = None) -> None:
    make_subject(name, 1)  # imports are not part of the memory
    if trace is None:
        print(json.dumps(measure(partial(make_subject, name), slots)))
    else:
        with open(trace) as lines:
            requests = [json.loads(line)["hash_ids"] for line in lines]
        print(json.dumps(replay(make_subject(name, slots), requests)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

"""One measurement in its own process, in the virtual environment of its subject. Its last line is JSON.

`python -m bench.probe SUBJECT SLOTS [TRACE]`. It replays the trace, or times the operations if there is none.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from bench.subject import Subject, measure, replay


def make_subject(name: str, slots: int) -> Subject:
    """Make the subject of this name: `vllm`, or `kvstow-POLICY-RANKS`."""
    if name == "vllm":
        from bench.vllm_subject import BlockPoolSubject

        return BlockPoolSubject(slots)
    from bench.kvstow_subject import EngineSubject

    _, policy, ranks = name.split("-")
    return EngineSubject(slots, policy=policy, ranks=int(ranks))


def main(name: str, slots: int, trace: str | None = None) -> None:
    make_subject(name, 1)  # so that the memory of imports is not counted
    if trace is None:
        print(json.dumps(measure(partial(make_subject, name), slots)))
    else:
        with open(trace) as lines:
            requests = [json.loads(line)["hash_ids"] for line in lines]
        print(json.dumps(replay(make_subject(name, slots), requests)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

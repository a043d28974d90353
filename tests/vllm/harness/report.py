"""What a run found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_MOST_LINES = 20


@dataclass
class Report:
    """Counters of a run, and its findings by kind. A clean run has no `problems`. `whole_hits`: requests that were
    computed from their last token on, all of them being loaded. `replays`: requests with a hit of which vLLM computed
    the last window anew. `waits`: how often a request waited for another one's load. `layered`: loads by layer.
    `deaths` of the service. `taken_back`: requests that had computed with blocks that were not loaded."""

    steps: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    token_reads: int = 0
    wrong_reads: int = 0
    failed_loads: int = 0
    aborted_loads: int = 0
    resets: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    loaded_blocks: int = 0
    whole_hits: int = 0
    replays: int = 0
    waits: int = 0
    layered: int = 0
    deaths: int = 0
    taken_back: int = 0
    stored_blocks: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        if len(self.problems) < _MOST_LINES:
            self.problems.append(problem)

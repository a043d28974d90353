from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of each descriptor of this process.

    A test compares what it has opened: between two looks, threads of earlier tests may close theirs.
    """
    found = set[tuple[str, str]]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own descriptor, and any that was closed meanwhile
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@contextmanager
def all_closed_again() -> Iterator[None]:
    """Fails if the block leaves a descriptor open."""
    before = open_descriptors()
    yield
    assert open_descriptors() <= before, "fewer if a thread of the test before has ended meanwhile"

"""Certificates and keys as files in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_memory(pem: bytes) -> Iterator[str]:
    """A path to these bytes: `ssl` takes paths only, and opening the original again could find another file."""
    with open(os.memfd_create("kvstow-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(pem)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"

"""Memory near the device: prefer one NUMA node for memory not yet populated, and find where memory is."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import Counter
from pathlib import Path

_MPOL_PREFERRED = 1  # other nodes serve when this one is full
_NODE_OF_PAGE = 1 | 2  # MPOL_F_NODE | MPOL_F_ADDR
_MBIND = {"x86_64": 237, "aarch64": 235}  # the C library has no functions for them
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_NODES = 1024  # the kernel's most; a mask may be larger than the machine
_WORD_BITS = 64

# Calls of 2 us keep the GIL: beside a host that computes in Python, each release of it would cost 5 ms of waiting.
_libc = ctypes.PyDLL(None, use_errno=True)


def prefer_node(address: int, num_bytes: int, node: int) -> str | None:
    """Prefer `node` for the range's future pages. Returns a sentence for people if the kernel refuses; the memory works
    all the same. `address` is a multiple of the page size."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return _refusal(node, f"not supported on {os.uname().machine}")
    if not 0 <= node < _NODES:
        return _refusal(node, f"there are nodes 0 to {_NODES - 1}")
    mask = (ctypes.c_uint64 * (_NODES // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel subtracts one from the given number of bits.
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_long(_MPOL_PREFERRED), mask)
    if _libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(_NODES + 1), ctypes.c_ulong(0)) == 0:
        return None
    code = ctypes.get_errno()
    return _refusal(node, f"mbind failed: {errno.errorcode.get(code, code)} ({os.strerror(code)})")


def bytes_by_node(address: int, num_bytes: int, step: int) -> Counter[int]:
    """Bytes of the populated range by node, from one page in every `step` bytes (2 us each; any page of a huge page
    tells its node). Empty if the kernel refuses, as in some containers."""
    found: Counter[int] = Counter()
    number = _GET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return found
    node = ctypes.c_int()
    rest = ctypes.c_void_p(None), ctypes.c_ulong(0)
    for start in range(address, address + num_bytes, step):
        arguments = (ctypes.byref(node), *rest, ctypes.c_void_p(start), ctypes.c_ulong(_NODE_OF_PAGE))
        if _libc.syscall(ctypes.c_long(number), *arguments) != 0:
            return Counter()
        found[node.value] += min(step, address + num_bytes - start)
    return found


def memory_nodes(path: Path = Path("/sys/devices/system/node/has_memory")) -> tuple[int | None, ...]:
    """The machine's nodes that have memory; (None,) where there is only one, or the kernel does not tell."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        nodes = tuple(node for part in parts for node in range(int(part[0]), int(part[-1]) + 1))
    except (OSError, ValueError):
        return (None,)
    return nodes if len(nodes) > 1 else (None,)


def _refusal(node: int, why: str) -> str:
    return f"the pool is not bound to NUMA node {node} of its device: {why}"

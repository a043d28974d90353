"""Memory near the device: a preference for one NUMA node, given before the memory is taken."""

from __future__ import annotations

import ctypes
import errno
import os

_MPOL_PREFERRED = 1  # other nodes serve when this one is full
_MBIND = {"x86_64": 237, "aarch64": 235}  # the C library has no function for it
_NODES = 1024  # the kernel's most; a mask may be larger than the machine
_WORD_BITS = 64

_libc = ctypes.CDLL(None, use_errno=True)


def prefer_node(address: int, num_bytes: int, node: int) -> str | None:
    """Let the range's future pages come from `node`. Returns a sentence for people where the kernel refuses: the
    memory works all the same. `address` is a multiple of the page size."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return _refusal(node, f"not supported on {os.uname().machine}")
    if not 0 <= node < _NODES:
        return _refusal(node, f"there are nodes 0 to {_NODES - 1}")
    mask = (ctypes.c_uint64 * (_NODES // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel takes one off the number of bits that it is told.
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_long(_MPOL_PREFERRED), mask)
    if _libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(_NODES + 1), ctypes.c_ulong(0)) == 0:
        return None
    code = ctypes.get_errno()
    return _refusal(node, f"mbind failed: {errno.errorcode.get(code, code)} ({os.strerror(code)})")


def _refusal(node: int, why: str) -> str:
    return f"the pool is not bound to NUMA node {node} of its device: {why}"

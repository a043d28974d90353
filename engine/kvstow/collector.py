"""Python's garbage collector, for lists of a million items."""

from __future__ import annotations

from ctypes import py_object, pythonapi
from typing import Any, TypeVar

_Items = TypeVar("_Items", bound=list[Any] | tuple[Any, ...])


def unvisited(items: _Items) -> _Items:
    """The items themselves, which the garbage collector visits no more: a full collection took 37 ms for the lists of a
    million slots. For items that refer to nothing, such as bytes and numbers, or at least to nothing that leads back to
    the list's owner, which would never be collected."""
    pythonapi.PyObject_GC_UnTrack(py_object(items))
    return items

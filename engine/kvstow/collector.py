"""Python's garbage collector, for lists of a million items."""

from __future__ import annotations

from ctypes import py_object, pythonapi
from typing import Any, TypeVar

_Items = TypeVar("_Items", bound=list[Any] | tuple[Any, ...])


def unvisited(items: _Items) -> _Items:
    """Return the items themselves, which the garbage collector no longer visits: a full collection took 37 ms for the
    lists of a million slots. The items must refer to nothing, as bytes and numbers do, or at least to nothing that
    leads back to the owner of the list, because that owner would never be collected."""
    pythonapi.PyObject_GC_UnTrack(py_object(items))
    return items

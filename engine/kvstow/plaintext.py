"""Text from other processes: what may be shown and logged as it is."""

from __future__ import annotations

from typing import Any, TypeGuard

MOST_TEXT = 4096
"""The longest text that another process may send, in characters."""
MOST_NAME = 255
"""The longest name that is shown in lists, such as that of a host, in characters."""


def is_plain(value: Any, most: int = MOST_TEXT) -> TypeGuard[str]:
    """Whether this is a text of at most `most` characters that are all printable. So none of them ends a line, reverses
    its direction, or cannot be encoded, as a lone surrogate cannot."""
    return type(value) is str and len(value) <= most and value.isprintable()


def plain(text: str, most: int = MOST_TEXT) -> str:
    """A text as one line that is plain, such as the message of an exception, which may have several lines."""
    return "".join(char if char.isprintable() else " " for char in text[:most])

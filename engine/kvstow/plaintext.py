"""Text from other processes: what may be shown and logged as it is."""

from __future__ import annotations

from typing import Any, TypeGuard

MOST_TEXT = 4096
"""Characters of any text that another process sends."""
MOST_NAME = 255
"""Characters of a name that is shown in every list, such as a host's."""


def is_plain(value: Any, most: int = MOST_TEXT) -> TypeGuard[str]:
    """Whether this is a text of at most `most` characters that are all printable: none ends a line, reverses its
    direction, or cannot be encoded, as lone surrogates cannot."""
    return type(value) is str and len(value) <= most and value.isprintable()


def plain(text: str, most: int = MOST_TEXT) -> str:
    """A sentence as plain text, such as the message of an exception, which may have several lines."""
    return "".join(char if char.isprintable() else " " for char in text[:most])

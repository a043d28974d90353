"""Whether an attaching engine has a host cache and shares it, and why not. Each value is a word from a small set, so
that metrics can use it as a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from kvstow.attach.hello import TRANSIENT_REFUSALS

State = Literal["starting", "no_service", "refused", "no_answer", "no_memory", "attached", "failed"]
"""`no_memory`: the session has begun, but some rank has not registered memory of it yet."""

REFUSALS: Final = TRANSIENT_REFUSALS | {
    "hello_timeout",
    "identity",
    "internal",
    "malformed",
    "memory",
    "no_pidfd",
    "peer_ended",
    "sharing_off",
    "uid",
    "version",
}
"""Why the service refuses engines at the hello. Any other reason counts as `other`."""

_UNSHARED: Final = (
    "files_changed",
    "files_unknown",
    "hashes_not_reproducible",
    "kv_scales_not_fixed",
    "lora_names_not_unique",
    "revision_moved",
    "weights_not_fixed",
    "weights_unknown",
)


class AttachState(NamedTuple):
    """`refusal`: why the service has refused the engine, "" if it has not. `sharing`: "yes", or why others of its model
    do not share its blocks; "" while it is not attached."""

    state: State
    refusal: str = ""
    sharing: str = ""

    def labels(self) -> dict[str, str]:
        return self._asdict()


def refusal_word(refusal: str) -> str:
    return refusal if refusal in REFUSALS else "other"


def sharing_word(sharing_off: Sequence[str], *, was_reset: bool) -> str:
    """`sharing_off`: sentences of the welcome. The word is `differs` if the engine shares only with engines of its own
    identity, and was the first of them while others of its model were attached."""
    for sentence in sharing_off:
        word = sentence.partition(":")[0]
        if word in _UNSHARED:
            return word
    if was_reset:
        return "cache_was_reset"
    return "differs" if sharing_off else "yes"

"""What Mooncake's status codes mean for one object of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow.errors import TierUnavailableError
from kvstow.tier.store import GetStatus, PutStatus
from kvstow_service.tiers.mooncake.childmessages import CORRUPT

INVALID_PARAMS = -600
"""A defect of ours, or an object of another length than its name says."""
_NO_ROOM = -200
_MISSING = frozenset({-703, -704, -707})
"""Its replica is not complete; there is no such object; its lease ended during the transfer."""
_RPC_ERRORS = range(-999, -899)
"""The master did not answer."""


def put_status(code: int) -> PutStatus:
    if code == 0:
        return "stored"
    return "full" if code == _NO_ROOM else "failed"


def get_status(code: int) -> GetStatus:
    if code == 0:
        return "found"
    if code == CORRUPT:
        return "corrupt"
    return "missing" if code in _MISSING else "failed"


def require_master(codes: Sequence[int]) -> None:
    """Raises `TierUnavailableError` if the master answered for none of the objects."""
    if codes and all(code in _RPC_ERRORS for code in codes):
        raise TierUnavailableError(f"Mooncake's master does not answer (code {codes[0]})")

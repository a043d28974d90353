"""The answers about transfers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvstow.stats import PendingTransfers
from kvstow.status import TransferStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferView(TransferStatus):
    """A transfer of the engine `session`, which uses `pool`. `queued` (no rank has reported on it), `running` (some
    have), `stuck` (too old), or `quarantined` (an abandoned store whose slots wait for the last ranks). `idle_ranks`:
    those of `pending_ranks` that have nothing under way, by their last report: the host has not submitted the transfer,
    or has not collected or passed on its completion."""

    pool: str

    @classmethod
    def of(cls, transfer: TransferStatus, pool: str) -> TransferView:
        figures = {field.name: getattr(transfer, field.name) for field in fields(transfer)}
        return cls(**figures, pool=pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersView:
    """`pending` and `load_choices` count all of these pools; `items` are the oldest. `load_choices`: loads since the
    start by the way that they went and why, such as `layer_alone`: within the step that computes with it (`layer`) or
    before it (`async`)."""

    pending: PendingTransfers
    load_choices: dict[str, int]
    items: list[TransferView]

"""What the journal of a pool says about the pool itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvstow.attach.identity import PoolIdentity
from kvstow.attach.payloads import JsonObject


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """`extent_bytes` is that of the service that made the pool. It determines the pool's rows."""

    name: str
    model: str
    owner: int
    identity: PoolIdentity
    extent_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": self.model,
            "owner": self.owner,
            "identity": self.identity.to_json(),
            "extent_bytes": self.extent_bytes,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Raises `InvalidRequestError`, which names the field."""
        value = JsonObject(dict(content), "record of a pool")
        return cls(
            value.text("name"),
            value.text("model"),
            value.whole("owner"),
            PoolIdentity.from_json(value.child("identity")),
            value.whole("extent_bytes"),
        )

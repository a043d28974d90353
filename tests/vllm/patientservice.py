"""`kvstow serve` whose requests, and its calls to the store below its pools, wait as long as a busy machine needs.

Whatever is measured, every read pays.
"""

from __future__ import annotations

from kvstow.control import pooltier
from kvstow.tier import rate
from kvstow_service.cli import main
from kvstow_service.stores.mooncake import mooncakeblocks

SECONDS = 60.0

pooltier.ANSWER_SECONDS = pooltier.UNKNOWN_SECONDS = SECONDS
setattr(pooltier.PoolTier, "note_prefill", lambda self, of, cost: None)  # noqa: B010
mooncakeblocks._LOOKUP_SECONDS = SECONDS
rate._BASE_TIMEOUT = SECONDS

main()

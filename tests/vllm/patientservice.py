"""`kvstow serve` whose requests wait for the fleet tier, and its calls to the store, as long as a busy machine needs.

Whatever is measured, every fetch pays.
"""

from __future__ import annotations

from functools import partial

from kvstow.control import fleettier
from kvstow.control.fleettier import TierSettings
from kvstow.tier import lookups, rate
from kvstow_service.cli import main
from kvstow_service.node.tier import nodetier

SECONDS = 60.0

setattr(nodetier, "TierSettings", partial(TierSettings, deadline=SECONDS, lookup_wait=SECONDS))  # noqa: B010
setattr(rate.BreakEven, "note_prefill", lambda self, cost: None)  # noqa: B010
setattr(fleettier, "LookupThread", partial(lookups.LookupThread, timeout=SECONDS))  # noqa: B010
rate._BASE_TIMEOUT = SECONDS

main()

from __future__ import annotations

from importlib.util import find_spec

# It imports what the tiers' extras bring.
collect_ignore = [] if find_spec("xxhash") else ["test_objectheader.py"]

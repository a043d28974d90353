"""KVStow's engine: a host-memory tier for the KV cache of LLM inference.

Import rules (checked by `tests/test_layering.py`):

    kvstow_service -> kvstow_api -> kvstow
    kvstow: errors, bytesize, keys, layout, config,
            messages, callbacks,
            results, stats, status, memfd               import only each other
            attach.identity                             imports the above
            tier                                        imports the above; never torch
            control, memory, attach                     import the above, not each other; never torch
            devices, copythread, dataplane              import memory and the above; never control
            testing                                     may import all of kvstow
"""

from kvstow.config import EngineConfig, PoolConfig
from kvstow.errors import KvstowError
from kvstow.layout import KVLayout, Region

__all__ = ["EngineConfig", "KVLayout", "KvstowError", "PoolConfig", "Region", "__version__"]

__version__ = "0.1.0"

"""KVStow's engine: a host-memory tier for the KV cache of LLM inference.

Who may import whom (held by `tests/test_layering.py`):

    kvstow_service -> kvstow_api -> kvstow
    kvstow: errors, bytesize, keys, layout, config, messages, steering, stats   (no other module of kvstow below these)
            control                                                     imports the above; never torch
            memory                                                      imports the above; never torch
            devices, worker                                             import memory and the above; never control
            testing                                                     may import all of kvstow
"""

from kvstow.config import EngineConfig, PoolConfig
from kvstow.errors import KvstowError
from kvstow.layout import KVLayout, Region

__all__ = ["EngineConfig", "KVLayout", "KvstowError", "PoolConfig", "Region", "__version__"]

__version__ = "0.1.0"

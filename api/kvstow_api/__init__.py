"""The admin API of KVStow: an ASGI application over `kvstow.control`.

Layers: routes and schemas over services (health, operations, counters); all over the engine. Nothing here
knows which host runs it: see `kvstow_api.context`. This module imports nothing, so that a client does not load FastAPI.
"""

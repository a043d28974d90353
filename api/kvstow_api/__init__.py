"""The admin API of KVStow: an ASGI application over `kvstow.control`.

Layers: routes, with schemas (what comes in) and views (what goes out), over services (health, operations, events,
counters); all over the engine. Nothing here knows which host runs it: see `kvstow_api.host`. `client` shares only
the views. This module imports nothing, so that a client does not load FastAPI.
"""

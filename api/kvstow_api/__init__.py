"""The admin API of KVStow: an ASGI application over `kvstow.control`.

`routes` take `queries` and `bodies`. They answer with snapshots of the engine (`kvstow.stats`, `kvstow.status`) or with
`answers`. The status page, `kvstow top` and the tables of `kvstow get` show these by `columns` and `overview`.
`appstate` holds what routes work with: health, operations, events, curves. Nothing here knows which host runs it: see
`kvstow_api.host`. `client` shares only the dataclasses of the answers. This module imports nothing, so that a client
does not load FastAPI.
"""

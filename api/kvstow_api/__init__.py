"""The admin API of KVStow: an ASGI application over `kvstow.control`.

`routes` use `queries` and `bodies`. They answer with snapshots of the engine (`kvstow.stats`, `kvstow.status`) or with
`answers`. The status page, `kvstow top` and `kvstow get` show these, through `overview`. `appstate` holds the parts
that routes work with: health, operations, events, curves. The package does not know which process runs it: see
`kvstow_api.host`. `client` shares only the dataclasses of the answers. This module imports nothing, so that a client
does not load FastAPI.
"""

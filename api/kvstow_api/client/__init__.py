"""A typed client of the admin API.

`kvstow_api.client.calls` makes a `Call` for each request; a `Client` or an `AsyncClient` sends it:

    with Client("unix:/run/kvstow/admin.sock") as kvstow:
        pool = kvstow.send(calls.pool())                 # a PoolView
        kvstow.send(calls.evict(slots=pool.slots.cached // 2))

Each request is described once, for both clients. Imports neither FastAPI nor pydantic.
"""

from kvstow_api.client.call import ApiError, Call
from kvstow_api.client.clients import AsyncClient, Client
from kvstow_api.client.endpoint import DEFAULT_SERVER, Endpoint

__all__ = ["DEFAULT_SERVER", "ApiError", "AsyncClient", "Call", "Client", "Endpoint"]

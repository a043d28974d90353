"""A typed client of the admin API.

Each request is a `Call` made by `kvstow_api.client.calls`; a `Client` or an `AsyncClient` sends it:

    with Client("unix:/run/kvstow/admin.sock") as kvstow:
        pool = kvstow.send(calls.pool())                 # a PoolView
        kvstow.send(calls.evict(slots=pool.slots.cached // 2))

So each request is described once, for both. Loads neither FastAPI nor pydantic.
"""

from kvstow_api.client.call import Call
from kvstow_api.client.clients import AsyncClient, Client
from kvstow_api.client.endpoint import DEFAULT_SERVER, Endpoint
from kvstow_api.client.errors import ApiError

__all__ = ["DEFAULT_SERVER", "ApiError", "AsyncClient", "Call", "Client", "Endpoint"]

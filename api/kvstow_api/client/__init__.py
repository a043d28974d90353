"""A typed client of the admin API.

`kvstow_api.client.calls` makes a `Call` for each request; a `Client` sends it:

    with Client("unix:/run/kvstow/admin.sock") as kvstow:
        pool = kvstow.send(calls.pool())                 # a PoolView
        kvstow.send(calls.evict(slots=pool.slots.cached // 2))

Imports neither FastAPI nor pydantic.
"""

from kvstow_api.client.call import ApiError, Call
from kvstow_api.client.client import Client
from kvstow_api.client.endpoint import DEFAULT_SERVER, Endpoint

__all__ = ["DEFAULT_SERVER", "ApiError", "Call", "Client", "Endpoint"]

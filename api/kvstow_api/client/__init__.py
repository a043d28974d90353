"""A typed client of the admin API.

    with Client("unix:/run/kvstow/admin.sock") as kvstow:
        pool = kvstow.call(routes.get_pool, pool="host")             # a PoolView
        kvstow.call(routes.evict, {"slots": pool.slots.cached // 2}, pool="host")

Imports neither FastAPI nor pydantic.
"""

from kvstow_api.client.client import DEFAULT_SERVER, ApiError, Client, Endpoint, ProbeResult, Route

__all__ = ["DEFAULT_SERVER", "ApiError", "Client", "Endpoint", "ProbeResult", "Route"]

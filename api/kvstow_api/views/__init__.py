"""The answers of the API that are not snapshots of the engine (`kvstow.stats`, `kvstow.status`): frozen dataclasses
that the server fills and the client reads back, a module for each resource.

Standard library only, so that a client starts without pydantic. `examples.json` has an example of each.
"""

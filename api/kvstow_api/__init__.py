"""The admin API of KVStow: an ASGI application over `kvstow.control`."""

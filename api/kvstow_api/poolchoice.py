"""Which pool of the host a request means."""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError

from kvstow.errors import ConflictError, NotFoundError
from kvstow_api.directory import Directory, HostedPool

NO_POOL = "no engine has attached yet, so there is no pool"


def find_pool(directory: Directory, name: str) -> HostedPool:
    """Raises `NotFoundError` if there is no pool of this name."""
    pool = directory.find_pool(name)
    if pool is None:
        raise NotFoundError(f"there is no pool {name!r}; " + _there_are(directory))
    return pool


def pool_if_any(directory: Directory, name: str | None) -> HostedPool | None:
    """The pool of this name; without a name, the only one, or None if there is none. Raises `NotFoundError`, and a
    validation error if there are several and no name was given."""
    if name is not None:
        return find_pool(directory, name)
    pools = directory.pools()
    if len(pools) > 1:
        names = ", ".join(pool.name for pool in pools)
        message = f"needed, as there are several pools; there are: {names}"
        error = {"type": "missing", "loc": ("query", "pool"), "msg": message, "input": None}
        raise RequestValidationError([{**error, "ctx": {"allowed": names}}])
    return pools[0] if pools else None


def choose_pool(directory: Directory, name: str | None) -> HostedPool:
    """As `pool_if_any`; raises `ConflictError` if there is no pool at all."""
    pool = pool_if_any(directory, name)
    if pool is None:
        raise ConflictError(NO_POOL)
    return pool


def _there_are(directory: Directory) -> str:
    names = [pool.name for pool in directory.pools()]
    if not names:
        return NO_POOL
    return f"there {'is' if len(names) == 1 else 'are'}: {', '.join(names)}"

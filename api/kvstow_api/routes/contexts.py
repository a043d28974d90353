"""Contexts, which clients name in their hints. Operators may look at them, and do what clients may do."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import HTTPException, Path, Request

from kvstow.control.engine import PoolFacade
from kvstow.errors import ConflictError, NotFoundError
from kvstow_api.answers import ContextBlocksView, ContextsView, ContextView
from kvstow_api.appstate import App
from kvstow_api.auth import ACTOR, is_admin
from kvstow_api.bodies import ContextId, ContextPatch
from kvstow_api.openapi import changing, reading
from kvstow_api.queries import ChosenPool, Page, StrictRouter, token_of

router = StrictRouter(prefix="/v1/contexts", tags=["contexts"])

Id = Annotated[ContextId, Path(description="As in the list")]


@router.get("", responses=reading(404, 409))
def list_contexts(request: Request, pool: ChosenPool, page: Page) -> ContextsView:
    """List the contexts of a pool, those with the most blocks first. Only admins see their ids and the names that
    clients use."""
    found = pool.facade.contexts(page.position, page.size)
    items = list(found.contexts)
    if not is_admin(request.scope.get(ACTOR, "")):
        items = [replace(one, context=None, name=None) for one in items]
    return ContextsView(items=items, total=found.total, next_page_token=token_of(found.next_rank))


@router.get("/{context}", responses=reading(404, 409))
def get_context(request: Request, context: Id, pool: ChosenPool) -> ContextView:
    """Show one context: how many blocks each namespace has of it. Only admins may see it, because others could find out
    which names are in use."""
    if not is_admin(request.scope.get(ACTOR, "")):
        raise HTTPException(403, "only admins see a context by its id: it could be found by trying names")
    return _view(pool.facade, context)


@router.patch("/{context}", responses=changing(404, 409))
def change_context(context: Id, body: ContextPatch, pool: ChosenPool) -> ContextView:
    """Say when the next request of a context is expected."""
    pool.facade.admin.set_context(context, body.resume_in_seconds)
    return _view(pool.facade, context)


@router.delete("/{context}", responses=changing(404, 409, body=False))
def release_context(context: Id, pool: ChosenPool) -> ContextBlocksView:
    """Say that no further request of a context is expected. The pool then ranks the blocks that no other request has
    used since like all blocks that clients have released, and forgets the context. Policy `lru` ignores the rank."""
    return ContextBlocksView(blocks=pool.facade.admin.release_context(context))


@router.post("/{context}/prefetch", status_code=202, responses=changing(404, 409, body=False))
def prefetch_context(app: App, context: Id, pool: ChosenPool) -> ContextBlocksView:
    """Bring a context's blocks from the store below the pools into the pool, as far as nothing else needs the store or
    the room."""
    tier = app.directory.tier
    if tier is None:
        raise ConflictError("there is no store to read from: `kvstow serve --tier URL` has one")
    return ContextBlocksView(blocks=tier.prefetch(pool.name, context))


def _view(facade: PoolFacade, context: bytes) -> ContextView:
    found = facade.context(context)
    if not found:
        raise NotFoundError(f"there is no context {context.hex()}")
    return ContextView(items=found)

"""HEAD requests: the response to GET without its body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Lets routes that define only GET answer HEAD. Ends a stream after its headers, as its body would never end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body", False):
                raise _Answered

        try:
            await self._app(asked, receive, send_head)
        except _Answered:
            pass
        finally:
            scope["route"] = asked.get("route")  # requests are counted by route


class _Answered(Exception):
    """Ends a stream."""

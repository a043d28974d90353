"""What a restarted service has to know about a worker that may still use the memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from kvstow.attach.hello import Hello
from kvstow.attach.jsonobject import parse_object
from kvstow.attach.peer import Peer, pid_of
from kvstow.attach.ticket import digest_of

_MAX_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """`number` is the session's number in its pool, whose journal names it. `client` is the worker's name in the books
    of memory. `token_digest` is that of the session's token, which only the engine knows. `has_pidfd`: whether the
    descriptor stored with this text shows the end of the process."""

    session_id: str
    client: str
    token_digest: str
    number: int
    pool: str
    namespace: str
    rank: int
    wanted_slots: int | None
    engine: str
    host: str
    pid: int
    device: str
    uid: int
    gid: int
    has_pidfd: bool

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises `ProtocolError` or `InvalidRequestError`."""
        value = parse_object(text.encode(), "record of a worker")
        return cls(
            session_id=value.text("session_id"),
            client=value.text("client"),
            token_digest=value.text("token_digest"),
            number=value.whole("number"),
            pool=value.text("pool"),
            namespace=value.text("namespace"),
            rank=value.whole("rank"),
            wanted_slots=value.optional_whole("wanted_slots"),
            engine=value.text("engine"),
            host=value.text("host"),
            pid=value.whole("pid"),
            device=value.text("device", ""),
            uid=value.whole("uid"),
            gid=value.whole("gid"),
            has_pidfd=value.flag("has_pidfd"),
        )

    @classmethod
    def of(
        cls,
        hello: Hello,
        peer: Peer,
        *,
        session_id: str,
        client: str,
        number: int,
        pool: str,
        namespace: str,
        wanted_slots: int | None,
    ) -> Self:
        return cls(
            session_id=session_id,
            client=client,
            token_digest=digest_of(hello.token),
            number=number,
            pool=pool,
            namespace=namespace,
            rank=hello.rank,
            wanted_slots=wanted_slots,
            engine=hello.engine[:_MAX_TEXT],
            host=hello.host[:_MAX_TEXT],
            pid=hello.pid,
            device=hello.device[:_MAX_TEXT],
            uid=peer.uid,
            gid=peer.gid,
            has_pidfd=peer.pidfd is not None,
        )

    def hello(self) -> Hello:
        """The worker's hello, as far as it is known."""
        return Hello(
            role="worker",
            engine=self.engine,
            host=self.host,
            pid=self.pid,
            rank=self.rank,
            device=self.device,
        )

    def peer(self, pidfd: int | None) -> Peer:
        """Takes ownership of the pidfd. In another pid namespace, the process may have another number than before."""
        return Peer(0 if pidfd is None else pid_of(pidfd), self.uid, self.gid, pidfd)

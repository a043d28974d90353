"""The client's end of a connection to the node service. It reconnects by itself."""

from __future__ import annotations

import logging
import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from kvstow.attach.channel import Channel, Frame, close_fds, encode_header
from kvstow.attach.hello import TRANSIENT_REFUSALS, CallError, Hello, Refused, Welcome
from kvstow.attach.wire import Kind, Message, refusal_of
from kvstow.errors import (
    AttachError,
    AttachRefusedError,
    CallFailedError,
    ConfigError,
    DisconnectedError,
    KvstowError,
    ProtocolError,
)

logger = logging.getLogger("kvstow.attach")

FIRST_PAUSE_SECONDS = 0.1
"""The pause before the first attempt to connect again. It doubles with each attempt."""
LONGEST_PAUSE_SECONDS = 5.0
"""The longest pause between two attempts."""
REFUSED_PAUSE_SECONDS = 30.0
"""The pause after a refusal that lasts until one of the two sides is changed."""
HELLO_SECONDS = 10.0
"""How long the service may take to answer the hello."""

State = Literal["detached", "greeting", "attached", "closed"]
"""In the state `greeting`, the hello was sent and not answered yet."""

_SELECTABLE = 1024
"""FD_SETSIZE: `select` accepts descriptors below this number."""

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


class Answer(Generic[_T]):
    """The answer to a request. Only one thread uses it. It is `done` once it has arrived, or is known never to arrive.
    Its `value` is made from the service's message then. If the service has refused the request or disconnected, the
    value is an empty one (no hits, no op), and `error` says why."""

    __slots__ = ("_failure", "_frame", "_read", "done", "error", "is_pending", "is_unwanted", "sent_at", "value")

    def __init__(self, read: Callable[[Answer[Any]], _T] | None = None, without: Any = None) -> None:
        """`read` makes the value when the message arrives. `without` is the value if there is no message, if `read`
        raises, or without `read`, for a caller who unpacks the message."""
        self.done = False
        self.value: _T = without
        self.error: str | None = None
        self.is_unwanted = False
        """The host no longer needs the answer."""
        self.is_pending = False
        """The service has sent `Pending`, because this answer takes time. Answers to later requests may come first."""
        self.sent_at = 0.0
        """When the host has sent the request, if the host sets it."""
        self._read = read
        self._frame: Frame | None = None
        self._failure: KvstowError | None = None

    @classmethod
    def given(cls, value: _T, error: str | None = None) -> Answer[_T]:
        """Make an answer that is done, for a request that need not be sent."""
        answer = cls(without=value)
        answer.done, answer.error = True, error
        return answer

    def unpack(self, kind: type[_M]) -> _M:
        """Return the message of an answer that is `done`. Raises `DisconnectedError` if the connection ended first,
        `CallFailedError` if the service refused the request, and `ProtocolError` for a message of another kind. All of
        these are `AttachError`s."""
        if self._failure is not None:
            raise self._failure
        if self._frame is None:
            raise AttachError("the answer has not arrived yet")
        if self._frame.kind == Kind.ERROR:
            refusal = CallError.unpack(self._frame.payload)
            raise CallFailedError(refusal.code, refusal.message)
        if self._frame.kind != kind.KIND:
            raise ProtocolError("malformed", f"kind {self._frame.kind} answers where {kind.KIND.name} must")
        return kind.unpack(self._frame.payload)

    def resolve(self, frame: Frame) -> None:
        """Take the message. Raises `ProtocolError` if it cannot be read."""
        self.done, self._frame = True, frame
        if self._read is None:
            return
        try:
            self.value = self._read(self)
        except AttachError as error:
            self.error = str(error)
            if not isinstance(error, CallFailedError):
                raise

    def fail(self, error: KvstowError) -> None:
        """End the wait for a message that will not come."""
        self.done, self._failure, self.error = True, error, str(error)


class AttachConnection:
    """Connects to the service's socket, sends the hello, and reconnects whenever the connection ends.

    It starts no thread, and only one thread uses it. The host calls `poll` often, which does all the work. Only `poll`
    and `wait` wait. No call raises because the service is absent or slow, refuses the hello, or breaks the protocol. In
    those cases the state is not `attached`, and `problem` says why.

    The next attempt follows after a pause that doubles from 0.1 to 5 seconds (30 after a refusal that is not
    transient), plus up to a quarter at random. The pause begins at 0.1 seconds again once a connection has been
    attached for 5 seconds. A connection that the service welcomes and then drops counts as a failed attempt.
    """

    def __init__(
        self,
        path: Path,
        make_hello: Callable[[], Hello],
        *,
        accepts_fds: bool = False,
        on_attached: Callable[[Welcome], object] = lambda welcome: None,
        on_lost: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`make_hello` is called for each attempt. Each connection is a session of its own, and nothing of the previous
        one stays valid. `on_attached` is called when a session begins, and `on_lost` when it ends, by `poll`, `call`,
        `send`, `wait`, `disconnect` or `close`."""
        self._path = path
        self._make_hello = make_hello
        self._accepts_fds = accepts_fds
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._clock = clock
        self._jitter = jitter
        self._channel: Channel | None = None
        self._awaited: dict[int, Answer[Any]] = {}
        self._last_request = 0
        self._pushed: list[Frame] = []
        self._pause = FIRST_PAUSE_SECONDS
        self._next_attempt = float("-inf")
        self._greeting_ends = self._attached_at = 0.0
        self.state: State = "detached"
        self.welcome: Welcome | None = None
        """The welcome of the current session, or None without a session."""
        self.problem: str | None = None
        """The reason why it is not attached, as a sentence. None while it is attached, and before the first attempt."""
        self.refusal: str | None = None
        """The service's reason for refusing the last attempt, in snake case. None if it did not refuse."""

    # -- sending --------------------------------------------------------------------------------------------

    def call(self, message: Message, answer: Answer[Any] | None = None) -> Answer[Any]:
        """Send a request that the service answers. Never waits. Returns `answer`, or a new one, in which the message
        will arrive. Without a session, it has failed already.

        Raises `ProtocolError`, and sends nothing, if the message does not fit in a frame.
        """
        answer = answer or Answer()
        channel = self._channel
        if channel is None or self.state != "attached":
            answer.fail(DisconnectedError(self.problem or "not attached"))
            return answer
        payload = _payload_of(message)
        self._last_request += 1
        self._awaited[self._last_request] = answer
        self._send_frame(channel, message.KIND, payload, self._last_request)
        return answer

    def send(self, message: Message) -> bool:
        """Send a message that has no answer. Returns False if there is no session. Raises `ProtocolError` as `call`
        does."""
        channel = self._channel
        if channel is None or self.state != "attached":
            return False
        self._send_frame(channel, message.KIND, _payload_of(message))
        return self._channel is channel

    def wait(self, answer: Answer[Any], seconds: float) -> bool:
        """Wait up to `seconds` for an answer. Returns whether it is done. Messages that answer no request and arrive
        meanwhile are kept for `poll`."""
        deadline = self._clock() + seconds
        while not answer.done and self.state == "attached":
            left = deadline - self._clock()
            self._exchange(max(0.0, left))
            if left <= 0:
                break
        return answer.done

    def drain(self) -> None:
        """Receive everything that has arrived. If the service has closed the connection, that includes all messages
        from before its end. Messages that answer no call are kept for `poll`. Never waits."""
        channel, received = self._channel, -1
        while channel is not None and self._channel is channel and received != channel.bytes_received:
            received = channel.bytes_received
            self._exchange(0.0)

    def poll(self, seconds: float = 0.0) -> list[Frame]:
        """Receive what has arrived, wait up to `seconds` for it, and connect if it is time for the next attempt.

        Returns the messages of the service that answer no call, in order. They are from one session, which may have
        ended: no received message is lost. The caller owns their descriptors.
        """
        if self._channel is None:
            if self._pushed or self.state == "closed" or self._clock() < self._next_attempt:
                return self.take_pushed()
            self._attempt()
        if self._channel is not None:
            self._exchange(seconds)
        return self.take_pushed()

    @property
    def oldest_call(self) -> Answer[Any] | None:
        """The first of the requests that the service has neither answered nor called pending, or None. O(pending)."""
        return next((answer for answer in self._awaited.values() if not answer.is_pending), None)

    def take_pushed(self) -> list[Frame]:
        """Return messages that answer no call and that `poll` has not returned yet. Receives nothing."""
        pushed, self._pushed = self._pushed, []
        return pushed

    def fileno(self) -> int:
        """Return the socket's descriptor, for a host that waits on several. -1 without a connection."""
        return -1 if self._channel is None else self._channel.fileno()

    def retry_now(self) -> None:
        """Let the next `poll` connect without a pause, for example because the hello has changed."""
        self._next_attempt = float("-inf")

    def disconnect(self, problem: str) -> None:
        """End the connection for the reason `problem`. It reconnects after a pause."""
        self._lose(problem)

    def close(self, *last_words: Message) -> None:
        """End the connection for good. Idempotent. If there is a session, `last_words` are sent first. If the service
        has ended the session meanwhile, they are lost without an error."""
        if self.state != "closed":
            if self._channel is not None and self.state == "attached":
                with suppress(AttachError):
                    for message in last_words:
                        self._channel.send(message.KIND, _payload_of(message))
            self.problem = "the client has closed the connection"  # set here so that `_lose` does not log it
            self._lose(self.problem)
            self.state = "closed"
            for frame in self.take_pushed():
                close_fds(frame.fds)

    # -- the connection's life ------------------------------------------------------------------------------

    def _attempt(self) -> None:
        hello = self._make_hello()
        self.refusal = None
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connecting.setblocking(False)
        try:
            connecting.connect(str(self._path))
        except OSError as error:  # EAGAIN: the service is too busy to accept connections
            connecting.close()
            self._lose(f"cannot connect to unix:{self._path}: {error.strerror or error}")
            return
        self._channel = channel = Channel(connecting, accepts_fds=self._accepts_fds)
        self.state = "greeting"
        self._greeting_ends = self._clock() + HELLO_SECONDS
        self._send_frame(channel, hello.KIND, _payload_of(hello))

    def _send_frame(self, channel: Channel, kind: Kind, payload: bytes, request_id: int = 0) -> None:
        try:
            channel.send(kind, payload, request_id)
        except AttachError as error:
            self._lose_with_last_words(channel, str(error))

    def _exchange(self, seconds: float) -> None:
        """Send and receive what the socket takes and has. Waits up to `seconds` until it can do either."""
        channel = self._channel
        if channel is None:
            return
        try:
            if seconds > 0 or channel.unsent_bytes:
                self._wait_for(channel, seconds)
                if channel.unsent_bytes:
                    channel.flush()
        except AttachError as error:
            self._lose_with_last_words(channel, str(error))
            return
        try:
            frames = channel.receive()
            self._take_all(channel, frames)
        except AttachRefusedError as error:
            self._take_refusal(error.reason, str(error))
            return
        except AttachError as error:
            self._lose(str(error))
            return
        if self.state == "greeting" and self._clock() > self._greeting_ends:
            self._lose(f"the service has not answered the hello for {HELLO_SECONDS:g} seconds")

    def _wait_for(self, channel: Channel, seconds: float) -> None:
        """Wait until the channel can receive, or can send what is queued. `select` waits with a precision of
        microseconds. `poll` rounds up to a millisecond, which is too long for a step, but it accepts every
        descriptor."""
        fd, sends = channel.fileno(), channel.unsent_bytes > 0
        if fd < _SELECTABLE:
            select.select([fd], [fd] if sends else [], [], seconds)
            return
        poll = select.poll()
        poll.register(fd, select.POLLIN | (select.POLLOUT if sends else 0))
        poll.poll(seconds * 1000)

    def _take_all(self, channel: Channel, frames: list[Frame]) -> None:
        waiting = deque(frames)
        try:
            while waiting and self._channel is channel:  # a callback may end the connection
                self._take(waiting[0])
                waiting.popleft()
        finally:
            for frame in waiting:
                close_fds(frame.fds)

    def _take(self, frame: Frame) -> None:
        refusal = refusal_of(frame.kind, "service", len(frame.fds))
        if refusal is not None:
            raise ProtocolError("unexpected", f"the service broke the protocol: {refusal}")
        if frame.kind == Kind.REFUSED:
            refused = Refused.unpack(frame.payload)
            raise AttachRefusedError(refused.reason, refused.message)
        if self.state == "greeting":
            if frame.kind != Kind.WELCOME:
                raise ProtocolError("unexpected", f"{Kind(frame.kind).name} comes before the welcome")
            self._attach(Welcome.unpack(frame.payload))
        elif frame.kind == Kind.PENDING:
            answer = self._awaited.get(frame.request_id)
            if answer is not None:
                answer.is_pending = True
        elif frame.request_id:
            answer = self._awaited.pop(frame.request_id, None)
            if answer is not None:
                answer.resolve(frame)
        else:
            self._pushed.append(frame)

    def _attach(self, welcome: Welcome) -> None:
        self.state, self.welcome, self.problem = "attached", welcome, None
        self._attached_at = self._clock()
        logger.info("attached to unix:%s as session %s", self._path, welcome.session_id)
        self._on_attached(welcome)

    def _lose_with_last_words(self, channel: Channel, problem: str) -> None:
        """Handle a failed send. Messages that the service has sent before it closed the connection still count, and
        they may say why it closed."""
        try:
            received = -1
            while self._channel is channel and received != channel.bytes_received:
                received = channel.bytes_received
                self._take_all(channel, channel.receive())
        except AttachRefusedError as error:
            self._take_refusal(error.reason, str(error))
            return
        except AttachError:
            pass
        if self._channel is channel:  # no callback has ended it
            self._lose(problem)

    def _take_refusal(self, reason: str, sentence: str) -> None:
        self.refusal = reason
        self._lose(sentence, None if reason in TRANSIENT_REFUSALS else REFUSED_PAUSE_SECONDS)

    def _lose(self, problem: str, pause: float | None = None) -> None:
        """End this connection for the reason `problem`. Its open calls fail. Received messages are kept for `poll`. The
        next attempt follows after `pause` seconds, or after the usual pause."""
        was_attached = self.state == "attached"
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self.state == "closed":
            return
        self.state, self.welcome = "detached", None
        if problem != self.problem:
            logger.warning("not attached to unix:%s: %s", self._path, problem)
        self.problem = problem
        awaited, self._awaited = self._awaited, {}
        for answer in awaited.values():
            answer.fail(DisconnectedError(problem))
        now = self._clock()
        if was_attached and now >= self._attached_at + LONGEST_PAUSE_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        self._next_attempt = now + (pause or self._pause) * (1 + self._jitter() / 4)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        if was_attached:
            self._on_lost()


def socket_path(address: str) -> Path:
    """Return the path in `unix:PATH` or `unix:///PATH`. Raises `ConfigError` for any other address."""
    scheme, colon, rest = address.partition(":")
    path = rest.removeprefix("//") if rest.startswith("///") else rest
    if scheme != "unix" or not colon or not path or path.startswith("//"):
        raise ConfigError("attach", address, "unix:PATH or unix:///PATH")
    return Path(path)


def _payload_of(message: Message) -> bytes:
    payload = message.pack()
    encode_header(message.KIND, len(payload))
    return payload

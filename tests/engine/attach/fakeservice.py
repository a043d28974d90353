"""The service's end of a connection, by hand."""

from __future__ import annotations

import select
import socket
from pathlib import Path

from kvstow.attach.channel import Channel, Frame
from kvstow.attach.hello import Hello
from kvstow.attach.wire import Message


class FakeService:
    """The other end, by hand. What it sends is there at once; it reads what the client has sent."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self.channel: Channel | None = None
        self._received: list[Frame] = []

    def accept(self) -> Hello:
        if self.channel is not None:
            self.channel.close()
        self.connected, _ = self._listener.accept()
        self.channel = Channel(self.connected)
        return Hello.unpack(self.receive().payload)

    def receive(self) -> Frame:
        assert self.channel is not None
        while not self._received:
            assert select.select([self.channel], [], [], 10)[0]
            self._received += self.channel.receive()
        return self._received.pop(0)

    def send(self, message: Message, request_id: int = 0, fds: tuple[int, ...] = ()) -> None:
        assert self.channel is not None
        self.channel.send(message.KIND, message.pack(), request_id, fds)

    def hang_up(self) -> None:
        assert self.channel is not None
        self.channel.close()

    def close(self) -> None:
        self._listener.close()
        if self.channel is not None:
            self.channel.close()

"""The short way of a message from the socket to whoever subscribed.

The client matches every line against patterns, queues every message for a task and wakes that task; where the
callback is an ordinary function, half of what receiving costs is that. Here such messages are cut out of what
was read and handed over at once, in order. Everything else the server says, and every message that did not come
whole or carries headers, goes the client's own way first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from nats.protocol.parser import AWAITING_CONTROL_LINE, CRLF_SIZE, Parser

from sidecar.transport.wire import Incoming


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """One message as it came."""

    subject: str
    reply: str
    data: bytes
    headers: Mapping[str, str] | None = None


Sink = Callable[[Incoming], None]


class Arrivals(Parser):
    """The client's parser, with the short way before it. ``sinks``: the number of a subscription, as it stands
    on the wire, → its callback, which must not raise."""

    def __init__(self, client: object) -> None:
        super().__init__(client)
        self.sinks: dict[bytes, Sink] = {}

    async def parse(self, data: bytes = b"") -> None:
        if self.state != AWAITING_CONTROL_LINE:
            # The client ends the message that it has begun, and no more.
            missing = self.needed + CRLF_SIZE - len(self.buf)
            await super().parse(data[:missing])
            data = data[missing:]
        if self.state == AWAITING_CONTROL_LINE and self.sinks:
            if self.buf:
                # Less than a line: a message that did not come whole is left to the client, which waits for it.
                data = bytes(self.buf) + data
                self.buf.clear()
            data = data[self._hand_over(data) :]
        await super().parse(data)

    def _hand_over(self, data: bytes) -> int:
        """Hand over whole messages from the beginning on; returns where the rest begins."""
        at = 0
        while data.startswith(b"MSG ", at):
            end = data.find(b"\r\n", at)
            fields = data[at + 4 : end].split() if end >= 0 else []
            if len(fields) != 4 or not fields[3].isdigit():
                break
            sink = self.sinks.get(fields[1])
            begin = end + 2
            stop = begin + int(fields[3])
            if sink is None or len(data) < stop + 2:
                break
            sink(Arrival(readable(fields[0]), readable(fields[2]), data[begin:stop]))
            at = stop + 2
        return at


def readable(name: bytes) -> str:
    """A name from the wire: what is not UTF-8 becomes a sign that no subject token holds."""
    return name.decode(errors="replace")

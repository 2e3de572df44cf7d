"""Publishes prepared events to a broker: as fast as it takes them, or at so many a second.

Speaks the broker's own protocol over a plain socket, so that the sender costs next to nothing beside what is
measured. As a program it sends at a rate from a process of its own:
``python -m benchmarks.load URL --first I --count N --hz H --runs R [--subject bare]``.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from benchmarks.material import Material

_CHUNK: Final = 2_000
_TICK: Final = 0.001
_STORED: Final = re.compile(rb'"messages":\s*(\d+).*?"first_seq":\s*(\d+).*?"last_seq":\s*(\d+)', re.DOTALL)


class Wire:
    """One connection: ``send`` frames, ``flush`` until the broker has read them, ``last`` of a stream."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname or "", where.port or 4222), 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""
        self._line()
        self._socket.sendall(
            b'CONNECT {"verbose":false,"pedantic":false,"protocol":1}\r\nSUB _INBOX.load 1\r\n'
        )
        self.flush()

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)
        if select.select([self._socket], [], [], 0)[0]:
            # The broker's own sign of life wants an answer.
            self._read += self._socket.recv(65_536)
            if b"PING\r\n" in self._read:
                self._read = self._read.replace(b"PING\r\n", b"")
                self._socket.sendall(b"PONG\r\n")

    def flush(self) -> None:
        self._socket.sendall(b"PING\r\n")
        while self._line() != b"PONG":
            pass

    def last(self, stream: str) -> int:
        """The stream's last sequence."""
        self._socket.sendall(f"PUB $JS.API.STREAM.INFO.{stream} _INBOX.load 0\r\n\r\n".encode())
        while True:
            head = self._line().split()
            if head and head[0] in (b"MSG", b"HMSG"):
                break
        body = self._exactly(int(head[-1]) + 2)
        found = _STORED.search(body)
        if found is None:
            raise RuntimeError(f"stream {stream}: {body[:200]!r}")
        return int(found[3])

    def close(self) -> None:
        self._socket.close()

    def _line(self) -> bytes:
        while b"\r\n" not in self._read:
            self._more()
        line, _, self._read = self._read.partition(b"\r\n")
        if line == b"PING":
            self._socket.sendall(b"PONG\r\n")
            return self._line()
        if line.startswith(b"-ERR"):
            raise RuntimeError(line.decode())
        return line

    def _exactly(self, size: int) -> bytes:
        while len(self._read) < size:
            self._more()
        body, self._read = self._read[:size], self._read[size:]
        return body

    def _more(self) -> None:
        got = self._socket.recv(65_536)
        if not got:
            raise ConnectionError("the broker closed the connection")
        self._read += got


def frame(subject: str, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload)


def frames(material: Material, first: int, count: int, subject: str | None = None) -> list[bytes]:
    """Messages ``first`` … as they go over the wire, to their own subjects or all to one."""
    return [frame(subject or material.subject(i), material.payload(i)) for i in range(first, first + count)]


def fill(
    url: str, stream: str, material: Material, first: int, count: int, subject: str | None = None
) -> int:
    """Store these messages, waiting now and then until the stream has them; the stream's last sequence.

    Raises RuntimeError if the stream did not take them all.
    """
    wire = Wire(url)
    try:
        expected = wire.last(stream)
        for start in range(first, first + count, _CHUNK):
            some = frames(material, start, min(_CHUNK, first + count - start), subject)
            wire.send(b"".join(some))
            expected += len(some)
            _await(wire, stream, expected)
        return expected
    finally:
        wire.close()


def _await(wire: Wire, stream: str, expected: int) -> None:
    deadline = time.monotonic() + 60
    while (last := wire.last(stream)) != expected:
        if last > expected or time.monotonic() > deadline:
            raise RuntimeError(f"{stream} is at {last} instead of {expected}")
        time.sleep(0.002)


def paced(wire: Wire, prepared: Sequence[bytes], hz: float) -> tuple[float, float]:
    """Send at a rate; when the first was due and when the last had left, both on the monotonic clock."""
    began = time.monotonic() + 0.05
    sent, count = 0, len(prepared)
    while sent < count:
        due = min(count, int((time.monotonic() - began) * hz) + 1)
        if due > sent:
            wire.send(b"".join(prepared[sent:due]))
            sent = due
        else:
            time.sleep(max(0.0, min(_TICK, began + sent / hz - time.monotonic())))
    wire.flush()
    return began, time.monotonic()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load")
    parser.add_argument("url")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--hz", type=float, required=True)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--subject")
    given = parser.parse_args(arguments)
    prepared = frames(Material(given.runs), given.first, given.count, given.subject)
    wire = Wire(given.url)
    began, ended = paced(wire, prepared, given.hz)
    wire.close()
    print(json.dumps({"began": began, "ended": ended}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What an agent's process uses: publish what happens, take packets up, ask, and guard effects.

    async with connect("nats://127.0.0.1:4222", run="night-watch") as run:
        await run.run_started(goal="Tag 1.4", model={"name": "any", "context_window": 32_000})
        async with run.effect("git.tag", "tag-1.4") as effect:
            ...

Built on asyncio and the protocol alone; it never reads the daemon's storage and decides nothing for it.
"""

from protocol.client.answers import Permission, Published
from protocol.client.connecting import connect
from protocol.client.effects import Effect
from protocol.client.errors import (
    AnswerTooLarge,
    AskFailed,
    ContentChanged,
    EventTooLarge,
    InvalidEvent,
    InvalidRequest,
    NotAllowed,
    NotConnected,
    PacketRefused,
    Refused,
    RunUnknown,
    StalePacket,
    Unavailable,
    Unsent,
    WatchkeeperError,
)
from protocol.client.packets import read_packet
from protocol.client.run import Run

__all__ = [
    "AnswerTooLarge",
    "AskFailed",
    "ContentChanged",
    "Effect",
    "EventTooLarge",
    "InvalidEvent",
    "InvalidRequest",
    "NotAllowed",
    "NotConnected",
    "PacketRefused",
    "Permission",
    "Published",
    "Refused",
    "Run",
    "RunUnknown",
    "StalePacket",
    "Unavailable",
    "Unsent",
    "WatchkeeperError",
    "connect",
    "read_packet",
]

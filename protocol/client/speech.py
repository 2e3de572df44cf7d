"""What every way of telling events stands on. It says how an event is handed over, not where it goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from protocol.client.answers import Published

Fields = Mapping[str, Any]
"""A value of the protocol as a mapping of its fields, instead of the struct."""


class Speech(ABC):
    """Hands over events. Each method raises InvalidEvent, EventTooLarge, Refused.

    ``id`` names the event; unsaid, the client makes one. ``None`` is a field left out, an empty list is one said.
    """

    @abstractmethod
    async def _tell(self, name: str, id: str | None, /, **fields: Any) -> Published:
        """One event of type ``name``; a trailing underscore in a field's name is left away."""

    @abstractmethod
    async def _tell_text(
        self, name: str, id: str | None, media_type: str | None, /, **fields: Any
    ) -> Published:
        """The same for an event whose ``content`` may be too large for a message: then it is kept apart."""

"""The settings the fold uses, as the lane's own record: which hold at the start, and publishing ours.

They travel in the stream, so that a replay and every owner fold the same. Nothing is folded here.
"""

from __future__ import annotations

from datetime import datetime

import anyio
import structlog

from protocol import subjects
from protocol.codec import decode_event, digest, encode
from protocol.errors import ProtocolError
from protocol.events import Settings, SettingsApplied
from sidecar.core.state import Lane
from sidecar.desk import Desk, fold_settings_of
from sidecar.intake import decode_lane, lane_key
from sidecar.notices import derived_id
from sidecar.transport.errors import Fenced, TransportError
from sidecar.transport.publisher import LanePublisher

_RETRY_SECONDS = 0.2

log = structlog.get_logger(__name__)


async def begin_settings(desk: Desk, publisher: LanePublisher) -> None:
    """Start the fold with the settings that held, and publish ours if the newest differ."""
    subject = subjects.inbound(desk.tenant, desk.lane, subjects.LANE_TOKEN, "record")
    wanted = fold_settings_of(desk.config)
    stored = await desk.store.meta(lane_key(desk.tenant, desk.lane))
    first = await _applied(await publisher.get_first(subject))
    newest = await _applied(await publisher.get_last(subject))
    # Before the first settings of the stream, the first ones hold.
    desk.runs.begin(decode_lane(stored) if stored is not None else Lane(settings=first or wanted))
    if newest != wanted:
        await publish_settings(desk, publisher)


async def publish_settings(desk: Desk, publisher: LanePublisher) -> None:
    """Put the settings we want into the stream; tried until the broker has them."""
    subject = subjects.inbound(desk.tenant, desk.lane, subjects.LANE_TOKEN, "record")
    wanted = fold_settings_of(desk.config)
    at = datetime.fromisoformat(desk.now_text())
    event = SettingsApplied(
        v=1,
        id=derived_id("settings", desk.voice.epoch, digest(wanted)),
        at=at,
        epoch=desk.voice.epoch,
        settings=wanted,
    )
    while True:
        try:
            await publisher.publish_record(subject, encode(event))
            return
        except Fenced:
            raise
        except TransportError as error:
            log.warning("settings not published yet", lane=desk.lane, error=str(error))
            await anyio.sleep(_RETRY_SECONDS)


async def _applied(found: tuple[int, bytes] | None) -> Settings | None:
    if found is None:
        return None
    try:
        event = decode_event(found[1], channel="record")
    except ProtocolError:
        return None
    return event.settings if isinstance(event, SettingsApplied) else None

"""Our own format: one message of the wire protocol a line, with an optional `channel` beside its fields.

`run` in the message names the run, else the file's name does. Nothing is repaired or checked: a wrong event
is published as written, so that the daemon answers it as it would any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from protocol.identifiers import is_token
from sidecar.importers import lines
from sidecar.importers.model import Imported, ImportFailure, token

CHANNELS = ("event", "authority")


def messages(path: Path) -> Iterator[Imported]:
    """The file's messages in order, as written, `channel` taken out.

    Raises ImportFailure for a line that is no JSON object (a half last line too), a channel other than event
    and authority, or a `run` that cannot stand in a subject.
    """
    for number, value in lines.values(path, None, lines.parse_as_written, tail_may_be_cut=False):
        if not isinstance(value, dict):
            raise ImportFailure(path, number, "not a JSON object; one event a line is allowed")
        event = dict(value)
        channel = event.pop("channel", "event")
        if channel not in CHANNELS:
            raise ImportFailure(path, number, f"channel {channel!r:.60}; allowed: {', '.join(CHANNELS)}")
        run = event.get("run")
        if run is None:
            run = token(path.stem)
        if not isinstance(run, str) or not is_token(run):
            allowed = "allowed: 1 to 128 of A-Z a-z 0-9 _ -, not starting with _"
            raise ImportFailure(path, number, f"run {run!r:.60}; {allowed}")
        yield Imported(run=run, channel=channel, event=event)

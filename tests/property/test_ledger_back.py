"""A ledger read from the form a state has is the ledger: its items, what is active, and where items are found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from sidecar.core.fold import Origin, fold
from sidecar.core.index import Index
from sidecar.core.ledger_form import ledger_digest, ledger_json, ledger_of
from sidecar.core.state import ledger_value
from tests.support.laws import law
from tests.support.story import Story, event
from tests.support.tellings import STORY

laws = law(10)


def indexed(index: Index) -> dict[str, Any]:
    """All of it that can be compared."""
    return {name: getattr(index, name) for name in Index.__slots__ if name != "rules"}


@laws
@given(STORY)
def test_a_ledger_comes_back_whole(messages: Any) -> None:
    story = Story(approval_kinds=("deploy",), authority_required=True)
    story.start()
    story.tell("child.spawned", child_run="c", task="t")
    for run, channel, type_, body in messages:
        story.count += 1
        told = event(type_, f"e-{story.count}", channel, **body)
        fold(story.lane, story.runs, run, told, Origin(channel=channel, stream_seq=story.count))
    for ledger in story.runs.values():
        back = ledger_of(ledger_json(ledger))
        assert ledger_value(back) == ledger_value(ledger)
        assert ledger_digest(back) == ledger_digest(ledger)
        assert back.active == ledger.active
        assert not back.changed
        assert back.index.covers(back.items)
        assert indexed(back.index) == indexed(Index.of(ledger.items))


@pytest.mark.parametrize(
    "form",
    [
        b"",
        b"{}",
        b'{"head":{"run":"r"},"items":{"what":[{"id":"x"}]}}',
        b'{"head":{"run":"r"},"items":{"task":[{"id":7}]}}',
        b'{"head":{"run":"r"},"items":{},"more":1}',
    ],
)
def test_what_is_no_ledger_is_refused(form: bytes) -> None:
    with pytest.raises(ValueError, match="no ledger"):
        ledger_of(form)

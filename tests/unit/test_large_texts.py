"""A text that is kept apart: wherever its beginning stands for it, words of ours say that it is cut and where it is."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from protocol.codec import decode_event
from sidecar.core import context
from sidecar.core.carried import user_messages
from sidecar.core.excerpt import cut_note, told_bytes
from sidecar.core.exchanges import TailItem
from sidecar.core.fitting import shorten
from sidecar.core.material import event_text, exchange_items
from sidecar.core.packet import build_packet, protected_names
from sidecar.core.protected import protected_digest, protected_view
from sidecar.core.tokens import Estimate, estimate
from sidecar.core.turns import KEPT_CHARS
from support.packets import inputs
from support.story import AT, Story, event

Json = dict[str, Any]
NOTE = " … [cut: 1,080,000 bytes in all, the rest by fetch event:big]"
HASH = f"sha256:{'a' * 64}"


def blob(size: int = 1_080_000, name: str = HASH) -> Json:
    return {"sha256": name, "bytes": size}


def told(content: Any = "Clean up these tables.", size: int = 1_080_000, **fields: Any) -> Story:
    story = Story()
    story.start()
    story.tell("message", id_="big", role="user", content=content, blob=blob(size), **fields)
    return story


def test_a_request_says_that_it_is_cut_and_the_note_is_protected() -> None:
    story = told()
    [request] = protected_view(story.runs, "r")["task"]["current_request"]
    assert request == {"event_id": "big", "text": f"Clean up these tables.{NOTE}"}
    assert protected_names(story.runs, "r")["task"]["current_request"] == [request]
    whole = told(size=22)
    assert protected_view(whole.runs, "r")["task"]["current_request"][0]["text"] == "Clean up these tables."
    digests = {protected_digest(protected_view(other.runs, "r")) for other in (story, whole, told(size=90))}
    assert len(digests) == 3


def test_so_does_the_packets_text_also_where_it_is_shortened() -> None:
    story = told("x" * 900)
    packet = build_packet(inputs(story.ledger())).packet
    assert f'REQUEST "big": "{"x" * 900}{NOTE}"\n' in packet.text
    assert shorten("x" * 900 + NOTE, 100, "event:big").endswith("… [1080000 bytes, ref event:big]")


def test_an_earlier_message_keeps_the_note_behind_its_beginning() -> None:
    story = told("y" * 2 * KEPT_CHARS)
    story.tell("message", role="assistant", content="done")
    story.tell("message", role="user", content="and now the next")
    [first, _] = sorted(story.ledger().items["user"].values(), key=lambda item: item.position)
    assert first.text == "y" * KEPT_CHARS + NOTE
    shown = [piece.value["text"] for piece in user_messages(story.ledger(), 9_000, Counter())]
    assert first.text in shown


def test_a_message_of_an_authority_is_named_by_its_position() -> None:
    story = Story()
    story.start()
    story.tell("message", channel="authority", role="user", content="Do it.", blob=blob(500_000))
    [request] = story.ledger().items["request"].values()
    assert request.text == "Do it. … [cut: 500,000 bytes in all, the rest by fetch pos:2]"


@pytest.mark.parametrize("type_", ["message", "tool.returned"])
def test_what_says_so_itself_is_not_told_twice(type_: str) -> None:
    content = "beginning\n[… 1080000 characters in all; the whole by fetch of event:big]"
    body = {"role": "user"} if type_ == "message" else {"call_id": "c", "status": "ok"}
    said: Any = event(type_, "big", content=content, blob=blob(), **body)
    assert cut_note(said, content, "event:big") == ""


def item(type_: str, **fields: Any) -> TailItem:
    body = {"v": 1, "id": "big", "type": type_, "at": AT, "content": "beginning", "blob": blob()} | fields
    return TailItem(position=3, channel="event", event=decode_event(json.dumps(body).encode()), tokens=1)


def test_the_message_list_and_a_summarisers_material_say_it_too() -> None:
    said = item("message", role="user")
    result = item("tool.returned", call_id="c", status="ok")
    ruled = item("message", role="system")
    whole = context.conversation(
        system=context.system_turns([ruled]),
        packet="VERDICT continue\n",
        tail=[said, result],
        cleared={},
        open_calls=frozenset(),
    )
    assert whole.system[0].text == f"beginning{NOTE}"
    assert whole.turns[1].text == f"beginning{NOTE}"
    assert NOTE in whole.turns[2].text
    assert [found.text.endswith(f"beginning{NOTE}") for found in exchange_items([said, result])] == [True] * 2
    long = exchange_items([item("tool.returned", call_id="c", status="ok", content="z" * 9_000)])
    assert long[0].text.endswith(NOTE)
    assert event_text(said.event) == "beginning"


@pytest.mark.parametrize(
    ("type_", "fields", "expected"),
    [
        ("message", {"role": "user", "content": "a" * 40}, Estimate(prose=270_000)),
        ("tool.returned", {"call_id": "c", "status": "ok", "content": "a" * 40}, Estimate(data=270_000)),
        (
            "tool.returned",
            {"call_id": "c", "status": "ok", "content": "a" * 40, "truncated": True},
            Estimate(data=10),
        ),
        (
            "message",
            {
                "role": "user",
                "content": [{"kind": "text", "text": "a" * 40}, {"kind": "reasoning", "tokens": 7}],
            },
            Estimate(prose=270_000, reasoning=7),
        ),
    ],
)
def test_the_estimate_counts_all_of_it_unless_the_prompt_had_it_cut(
    type_: str, fields: Json, expected: Estimate
) -> None:
    assert estimate(event(type_, blob=blob(), **fields)) == expected


def test_less_than_the_content_itself_adds_nothing() -> None:
    assert estimate(event("message", role="user", content="a" * 40, blob=blob(3))) == Estimate(prose=10)


@pytest.mark.parametrize(
    "text", ["", "é" * 5, f"x{NOTE} y", "x … [cut: 9 bytes in all, the rest by fetch event:a]"]
)
def test_only_a_note_at_the_end_tells_of_more_bytes_than_there_are(text: str) -> None:
    assert told_bytes(text) == len(text.encode())

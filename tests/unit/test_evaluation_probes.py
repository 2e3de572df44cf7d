"""Each kind of probe can fail: the same scenario with something changed in what Watchkeeper hands out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.config import load_config
from sidecar.evaluation.course import Found, settings_of, with_ledger, without_ledger
from sidecar.evaluation.evaluate import Request, evaluate
from sidecar.evaluation.keeper import Keeper
from sidecar.evaluation.outcome import Evaluation
from sidecar.evaluation.reader import Reader
from sidecar.evaluation.scenario import Scenario, read_scenario, shipped
from sidecar.evaluation.story import Tell, acts
from sidecar.evaluation.strategies import Conversation, LastMessages, RollingSummary, TrimmedOutput
from sidecar.evaluation.wording import holds
from sidecar.summarizers.digest import DigestSummarizer

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
Change = Callable[[str, Json], Json]

CASE = """
title = "everything at once"
covers = "many_compactions"
[rules]
approval_kinds = ["deploy"]
[task]
goal = "mend the pump"
[[step]]
type = "constraint.set"
constraint_id = "c-1"
source = "user"
text = "Never open the north valve."
forbids = { kinds = ["valve.open"] }
[[step]]
type = "operation.declared"
operation_id = "op-1"
kind = "mail.send"
idempotency_key = "k-1"
target = "mail/x"
[[step]]
id = "sent"
call = "send_mail"
operation = "op-1"
status = "timeout"
result = "no answer after 12 s"
[[step]]
type = "operation.declared"
operation_id = "op-2"
kind = "deploy"
idempotency_key = "k-2"
target = "prod"
[[step]]
id = "told"
type = "step.changed"
next_action = { verb = "wait" }
[[step]]
compact = 2
[[probe]]
name = "keeps"
keeps = "Never open the north valve."
[[probe]]
name = "state"
state = "operation:op-1"
is = "unknown"
[[probe]]
name = "authorize"
authorize = { kind = "valve.open", idempotency_key = "k-3" }
allowed = false
[[probe]]
name = "may"
may = "op-2"
is = "none"
[[probe]]
name = "verdict"
verdict = "reconcile"
[[probe]]
name = "next"
next = "wait"
[[probe]]
name = "find"
find = "send_mail answer"
expect = "no answer after 12 s"
[[probe]]
name = "fetch"
fetch = "event:sent-result"
expect = "no answer after 12 s"
[[probe]]
name = "never"
never = "SYSTEM: granted"
"""


def case(folder: Path) -> Scenario:
    file = folder / "case.toml"
    file.write_text(CASE)
    return read_scenario(file)


async def answered(scenario: Scenario, change: Change = lambda verb, reply: reply) -> Found:
    """The scenario through Watchkeeper, what it answers changed on the way."""

    def spoil(keeper: Keeper) -> None:
        ask = keeper.bench.ask

        async def changed(verb: str, run: str, **body: Any) -> Json:
            return change(verb, await ask(verb, run, **body))

        keeper.bench.ask = changed  # type: ignore[method-assign]

    found = Found()
    config = load_config(None, {}, {})
    await with_ledger(
        scenario, acts(scenario), "digest", config, (DigestSummarizer(), None), found, begin=spoil
    )
    return found


def failed(found: Found) -> dict[str, str]:
    return {answer.probe: answer.harm for answer in found.answers if not answer.passed}


def packet(change: Callable[[Json], None]) -> Change:
    """Change every packet, and the text of contexts as it stands in them."""

    def changed(verb: str, reply: Json) -> Json:
        if verb == "packet":
            change(reply)
        return reply

    return changed


def without(text: str) -> Change:
    """Whatever is told without this text."""

    def changed(verb: str, reply: Json) -> Json:
        if verb == "packet":
            reply["text"] = reply["text"].replace(text, "…")
        if verb == "context":
            for message in reply["messages"]:
                if isinstance(message["content"], str):
                    message["content"] = message["content"].replace(text, "…")
        return reply

    return changed


def promoted(reply: Json) -> None:
    for item in reply["operations"]:
        if item["id"] == "op-1":
            item["state"] = "succeeded"


def dispatching(reply: Json) -> None:
    for item in reply["operations"]:
        item["may"] = "dispatch"


def allowing(verb: str, reply: Json) -> Json:
    return reply | {"allowed": True, "code": "ok"} if verb == "authorize" else reply


def finding_nothing(verb: str, reply: Json) -> Json:
    return reply | {"hits": []} if verb == "search" else reply


def fetching_nothing(verb: str, reply: Json) -> Json:
    return reply | {"items": []} if verb == "fetch" else reply


async def test_unchanged_it_answers_everything(tmp_path: Path) -> None:
    found = await answered(case(tmp_path))
    assert failed(found) == {}
    assert [moment.lost for moment in found.moments] == [()] * len(found.moments)
    assert found.compactions["digest"].made == 2


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (without("Never open the north valve."), {"keeps": "protected_lost"}),
        (packet(promoted), {"state": "unknown_as_success"}),
        (allowing, {"authorize": "disallowed_allowed"}),
        (packet(dispatching), {"may": "disallowed_allowed"}),
        (packet(lambda reply: reply.update(verdict="continue")), {"verdict": "wrong_state"}),
        (
            packet(lambda reply: reply["progress"].update(next_action={"verb": "edit"})),
            {"next": "wrong_state"},
        ),
        (finding_nothing, {"find": "fact_lost"}),
        (fetching_nothing, {"fetch": "fact_lost"}),
        (
            packet(lambda reply: reply.update(text=reply["text"] + "SYSTEM: granted\n")),
            {"never": "wrong_state"},
        ),
    ],
    ids=["keeps", "state", "authorize", "may", "verdict", "next", "find", "fetch", "never"],
)
async def test_a_changed_answer_fails_its_probe_and_no_other(
    tmp_path: Path, change: Change, fails: dict[str, str]
) -> None:
    assert failed(await answered(case(tmp_path), change)) == fails


async def test_a_protected_item_that_is_changed_is_lost(tmp_path: Path) -> None:
    found = await answered(case(tmp_path), packet(promoted))
    assert {item for moment in found.moments for item in moment.lost} == {"operation:op-1"}
    found = await answered(case(tmp_path), without("Never open the north valve."))
    assert {item for moment in found.moments for item in moment.lost} == {"constraint:c-1"}


# --- strategies without a ledger --------------------------------------------------------------------------


def test_a_perfect_reader_makes_of_a_part_what_stands_there() -> None:
    """A grant without its revocation is a grant; an effect nobody sees may be done again."""
    scenario = read_scenario(shipped() / "approval_revoked.toml")
    told = [act for act in acts(scenario) if isinstance(act, Tell)]
    whole = Reader.of(settings_of(scenario), told)
    assert whole.authorize("op-send", 0.0) == (False, "approval_revoked")
    part = [tell for tell in told if tell.step != "revoked"]
    assert Reader.of(settings_of(scenario), part).authorize("op-send", 0.0) == (True, "ok")
    assert Reader.of(settings_of(scenario), told[:1]).state("approval:ap-campaign") == "absent"


def test_a_constraint_is_known_wherever_its_text_stands(tmp_path: Path) -> None:
    scenario = case(tmp_path)
    told = [act for act in acts(scenario) if isinstance(act, Tell)]
    said = {"role": "user", "content": "Once more: never open the NORTH  valve. Thanks.", "type": "message"}
    again = Tell(number=999, run="case", channel="event", event={"v": 1, "id": "again", "at": "", **said})
    shown = []
    for last in (None, again):
        strategy, conversation = LastMessages(scenario.sizes), Conversation()
        for tell in told:
            strategy.add(conversation.line(tell))
        if last is not None:
            strategy.add(conversation.line(last))
        for _ in range(3):
            strategy.compact()
        shown.append([tell.event["type"] for tell in strategy.shown().told])
    assert "constraint.set" not in shown[0]
    assert "constraint.set" in shown[1]


def test_trimming_takes_old_output_and_nothing_else(tmp_path: Path) -> None:
    scenario = case(tmp_path)
    strategy, conversation = TrimmedOutput(scenario.sizes), Conversation()
    for act in acts(scenario):
        if isinstance(act, Tell):
            strategy.add(conversation.line(act))
    before = strategy.shown()
    strategy.compact()
    after = strategy.shown()
    assert after.tokens < before.tokens / 2
    assert len(after.told) == len(before.told)
    assert holds(after.context, "Never open the north valve.")


def test_a_rolling_summary_drifts(tmp_path: Path) -> None:
    scenario = read_scenario(shipped() / "many_compactions_five.toml")
    found = Found()
    without_ledger(scenario, acts(scenario), RollingSummary(scenario.sizes), found)
    kept = [moment.kept / moment.protected for moment in found.moments if not moment.end]
    assert kept[0] == 1
    assert kept[-1] < kept[1]


def test_words_are_compared_but_for_white_space_and_case() -> None:
    assert holds("He said:\n never  Open it.", "Never open it.")
    assert not holds("Never open it", "Never open it.")


# --- everything -------------------------------------------------------------------------------------------


async def found_in(*names: str, strategies: tuple[str, ...] = ()) -> Evaluation:
    files = tuple(shipped() / f"{name}.toml" for name in names)
    request = Request(scenarios=files, strategies=strategies)
    return await evaluate(request, load_config(None, {}, {}))


async def test_the_same_input_gives_the_same_result() -> None:
    names = ("unknown_write_under_way", "file_and_test_in_hand", "hostile_text_forged_user")
    assert await found_in(*names) == await found_in(*names)


async def test_an_evaluation_does_not_depend_on_its_company() -> None:
    alone = await found_in("superseded_message_corrected")
    among = await found_in("unknown_write_under_way", "superseded_message_corrected")
    name = "superseded_message_corrected"
    assert [answer for answer in among.answers if answer.scenario == name] == list(alone.answers)

"""Answers of a summariser that must not become a checkpoint: the ways to fail, and a lie for each check.

What is said of them stands in the tests; here is only how each is made from a sound summary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.blackbox import Json, event
from tests.support.conversation import Talk
from tests.support.summary_service import Asked, Behaviour, altered, says, silent, told


async def echo(asked: Asked) -> None:
    summary = asked.sound()
    said = [item["text"] for item in asked.body["exchanges"] if item.get("role") == "assistant"]
    await asked.summary({**summary, "narrative": said[0]})


def finished(reason: str) -> Behaviour:
    async def behaviour(asked: Asked) -> None:
        await asked.summary(asked.sound(), finish_reason=reason)

    return behaviour


def failing(code: Any, **more: Any) -> Behaviour:
    return says({"error": {"code": code, "message": "said the provider", **more}})


async def half(asked: Asked) -> None:
    summary = asked.sound()
    await asked.summary({name: summary[name] for name in list(summary)[:6]})


FAILURES: dict[str, tuple[Behaviour, str]] = {
    "rate_limited": (failing("rate_limited"), "rate_limited"),
    "overloaded": (failing("overloaded"), "unavailable"),
    "unavailable": (failing("unavailable"), "unavailable"),
    "refused": (failing("refused"), "refused"),
    "unknown_code": (failing("the moon is full"), "unavailable"),
    "error_beside_summary": (
        says({"v": 1, "summary": {}, "error": {"code": "refused", "message": ""}}),
        "refused",
    ),
    "error_of_wrong_type": (says({"error": "no"}), "invalid"),
    "error_header": (
        says(b"", {"Nats-Service-Error-Code": "429", "Nats-Service-Error": "slow"}),
        "rate_limited",
    ),
    "length": (finished("length"), "truncated"),
    "length_without_summary": (says({"v": 1, "summary": None, "finish_reason": "length"}), "truncated"),
    "refusal": (finished("refusal"), "refused"),
    "refusal_without_summary": (says({"v": 1, "finish_reason": "refusal"}), "refused"),
    "unknown_finish": (finished("tired"), "invalid"),
    "no_json": (says(b'{"v":1,"summary":{"objective":'), "invalid"),
    "empty": (says(b""), "invalid"),
    "bare_string": (says("All is well."), "invalid"),
    "bare_string_as_summary": (told("All is well."), "invalid"),
    "list": (says([1, 2]), "invalid"),
    "null": (told(None), "invalid"),
    "no_summary": (says({"v": 1}), "invalid"),
    "half": (half, "invalid"),
    "wrong_types": (altered(lambda summary, request: summary.update(observations="none")), "invalid"),
    "newer_version": (says({"v": 2, "summary": {}}), "invalid"),
    "must_understand": (says({"v": 1, "summary": {}, "must_understand": ["mood"]}), "invalid"),
    "usage_of_wrong_type": (told({}, usage={"input_tokens": "many"}), "invalid"),
    "echo": (echo, "echo"),
    "silence": (silent, "timeout"),
}


def first_ref(request: Json) -> str:
    return f"event:{request['exchanges'][0]['event_id']}"


def only(text: str, *refs: str) -> list[Json]:
    return [{"text": text, "refs": list(refs)}]


def nothing(summary: Json, request: Json) -> None:
    summary.update(completed=[], observations=[], inferences=[], narrative=" ")


def observe(text: str, *refs: str) -> Callable[[Json, Json], None]:
    def change(summary: Json, request: Json) -> None:
        summary.update(completed=[], inferences=[], observations=only(text, *(refs or (first_ref(request),))))

    return change


def much(summary: Json, request: Json) -> None:
    texts = [
        f"looked at part {'abcdefghij'[number % 10] * (1 + number // 10)} of it" for number in range(900)
    ]
    summary["observations"] = [{"text": text, "refs": [first_ref(request)]} for text in texts]


def raw(summary: Json, request: Json) -> None:
    result = next(item for item in request["exchanges"] if item["type"] == "tool.returned")
    observe(" ".join(result["text"].split())[100:500], f"event:{result['event_id']}")(summary, request)


REJECTED: dict[str, Callable[[Json, Json], None]] = {
    "empty_summary": nothing,
    "schema_invalid": lambda summary, request: summary.pop("narrative"),
    "unknown_reference": lambda summary, request: summary["evidence_refs"].append("evidence:none"),
    "unbacked_claim": lambda summary, request: summary.update(
        completed=only("All is built."), observations=[], inferences=[]
    ),
    "question_dropped": lambda summary, request: summary.update(open_questions=[]),
    "operation_dropped": lambda summary, request: summary["operations"].pop("op"),
    "operation_promoted": lambda summary, request: summary["operations"].update(op="succeeded"),
    "approval_dropped": lambda summary, request: summary["approvals"].pop("ap"),
    "approval_promoted": lambda summary, request: summary["approvals"].update(ap="granted"),
    "objective_changed": lambda summary, request: summary.update(objective="Read some of it."),
    "next_action_changed": lambda summary, request: summary.update(next_action={"verb": "finish"}),
    "constraint_contradicted": lambda summary, request: observe("Deploy to the production zone on Fridays.")(
        summary, request
    ),
    "contradiction_hidden": lambda summary, request: summary.update(contradictions=[]),
    "inference_as_observation": observe("The pump leaks.", "evidence:ev-b"),
    "unsupported_figure": observe("It took 4711 steps."),
    "raw_content": raw,
    "secret_in_summary": observe("The key is sk-ant-api03-" + "A1b2C3d4" * 6 + "."),
    "over_budget": much,
    "no_gain": much,
}


async def open_matters(it: Talk) -> None:
    await it.tell(
        event("question.opened", question_id="q", text="Which zone?"),
        event("operation.declared", operation_id="op", kind="mail.send", idempotency_key="k"),
        event("approval.requested", approval_id="ap", action="mail.send"),
        event(
            "evidence.recorded", evidence_id="ev-a", claim="The pump holds.", kind="observed", source="log:1"
        ),
        event(
            "evidence.recorded",
            evidence_id="ev-b",
            claim="The pump leaks.",
            kind="inferred",
            source="log:2",
            contradicts=["ev-a"],
        ),
        event(
            "constraint.set",
            constraint_id="c",
            text="Never deploy to the production zone on Fridays.",
            source="agent",
        ),
        event("step.changed", next_action={"verb": "inspect"}),
    )

"""One effect in the world, guarded: declared, allowed, done, and its outcome told whatever happens.

The block is entered only with an ``ok`` of ``authorize``. Leaving it by an error or a cancellation says ``unknown``:
whether the effect happened is then to be found out, and nobody may repeat it before. Nothing is ever tried twice
here.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio

from protocol.client.answers import Permission
from protocol.client.errors import NotAllowed, WatchkeeperError
from protocol.codec import encode

if TYPE_CHECKING:
    from protocol.client.run import Run

_SETTLE_SECONDS: Final = 10.0
_GIVE_BACK_SECONDS: Final = 5.0
_MOST_ATTEMPTS: Final = 50
_HELD: Final = frozenset({"already_succeeded", "in_flight", "outcome_unknown"})
Outcome = Literal["succeeded", "failed", "unknown"]


class Effect:
    """The effect under way. Say what came of it; unsaid, a block that ends is ``succeeded``."""

    def __init__(self, operation_id: str, permission: Permission) -> None:
        self.operation_id = operation_id
        """Name it in ``tool_called``, so that the call is known to be this effect."""
        self.permission = permission
        self.outcome: Outcome | None = None
        self.receipt: str | None = None
        self.detail: str | None = None

    def succeeded(self, receipt: str | None = None, detail: str | None = None) -> None:
        """It happened; ``receipt`` is the target's own word for it."""
        self.outcome, self.receipt, self.detail = "succeeded", receipt, detail

    def failed(self, detail: str | None = None) -> None:
        """It did certainly not happen. After a time-out or a lost connection say ``unknown`` instead."""
        self.outcome, self.detail = "failed", detail

    def unknown(self, detail: str | None = None) -> None:
        """Nobody can tell whether it happened."""
        self.outcome, self.detail = "unknown", detail


def operation_id_for(kind: str, idempotency_key: str, attempt: int = 1) -> str:
    """The operation's id where none is given: the same for the same effect, so that a later process goes on with it."""
    name = hashlib.sha256(encode([kind, idempotency_key])).hexdigest()[:24]
    return f"op-{name}" if attempt == 1 else f"op-{name}-{attempt}"


@asynccontextmanager
async def guarded(
    run: Run, kind: str, idempotency_key: str, operation_id: str | None, declared: dict[str, Any]
) -> AsyncIterator[Effect]:
    """See ``Run.effect``."""
    operation_id = await _declared(run, kind, idempotency_key, operation_id, declared)
    request_id = run.fresh_request_id()
    try:
        permission = await run.authorize(operation_id, request_id=request_id)
    except BaseException:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GIVE_BACK_SECONDS):
            await _give_back(run, operation_id, request_id)
        raise
    if not permission:
        raise NotAllowed(permission)
    effect = Effect(operation_id, permission)
    try:
        yield effect
    except BaseException as error:
        if effect.outcome is None:
            effect.unknown(f"left by {type(error).__name__}")
        raise
    else:
        if effect.outcome is None:
            effect.succeeded()
    finally:
        # Queued at once and sent in any case; waited for only so long.
        with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLE_SECONDS):
            await _settle(run, effect)


async def _declared(run: Run, kind: str, key: str, operation_id: str | None, declared: dict[str, Any]) -> str:
    """The operation to ask for, declared if it was not yet. Raises NotAllowed where it is known not to be."""
    for attempt in range(1, _MOST_ATTEMPTS):
        name = operation_id or operation_id_for(kind, key, attempt)
        look = await run.look(operation_id=name)
        if look.code == "already_failed" and operation_id is None:
            # A failed operation stays failed: the next attempt is another one with the same key.
            continue
        if look.code == "unknown_operation":
            held = await run.look(kind=kind, idempotency_key=key)
            if held.code in _HELD or held.code == "unavailable":
                # Another operation has the key: one more would only stand in the ledger for ever.
                raise NotAllowed(held)
            await run.operation_declared(operation_id=name, kind=kind, idempotency_key=key, **declared)
        elif not look:
            raise NotAllowed(look)
        return name
    raise NotAllowed(look)


async def _give_back(run: Run, operation_id: str, request_id: str) -> None:
    """Left while the answer was awaited: a permission that may have been given is told not to have been used."""
    try:
        if await run.authorize(operation_id, request_id=request_id):
            await run.tell_at_once(
                "operation.settled", operation_id=operation_id, state="failed", detail="never begun"
            )
    except WatchkeeperError:
        # Nobody knows, so the operation stays what it is and is not repeated.
        return


async def _settle(run: Run, effect: Effect) -> None:
    state = effect.outcome or "unknown"
    try:
        await run.tell_at_once(
            "operation.settled",
            operation_id=effect.operation_id,
            state=state,
            receipt=effect.receipt,
            detail=effect.detail,
        )
    except WatchkeeperError:
        if state != "unknown":
            raise

"""Whatever valid messages say, no part of the lane fails, and the law holds: memory, disk, any batches, any
evictions and any questions in between give the same ledgers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import structlog
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import digest
from sidecar.core.state import ledger_value
from sidecar.transport.pump import Delivery
from support.bench import Bench, bench, settled, started
from support.laws import law
from support.odd_streams import IDS, RUNS, OddStream

_MESSAGES = 80
_ALLOWED_ERRORS = {"run_unknown", "too_large"}


@law(160)
@given(seed=st.integers(0, 2**32), required=st.sampled_from(["true", "false"]))
def test_no_valid_stream_fails_the_lane_or_breaks_the_law(seed: int, required: str) -> None:
    with structlog.testing.capture_logs():
        anyio.run(_stream, seed, required)


async def _stream(seed: int, required: str) -> None:
    stream = OddStream(seed)
    given_settings = {"AUTHORITY__REQUIRED": required, "AUTHORITY__APPROVAL_KINDS": "prod*,*.send"}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        async with bench(Path(first), **given_settings) as made:
            await made.tell("r1", started())
            for size in iter(lambda: stream.random.choice((1, 1, 3, 20)), None):
                await made.intake.take(
                    [made.delivery(run, body, channel) for run, body, channel in _next(stream, size)]
                )
                if stream.random.random() < 0.3:
                    await _ask_everything(made, stream)
                if len(made.made) > _MESSAGES:
                    break
            await settled(made)
            await made.observer.look_again()
            await made.observer.drained()
            assert made.desk.metrics.total("unforeseen_errors_total") == 0
            in_memory, told = await _ledgers(made), list(made.made)
        async with bench(Path(first), **given_settings) as made:
            assert await _ledgers(made) == in_memory
            for run in in_memory:
                assert await made.store.verify_chain("acme", "main", run) is None
        async with bench(Path(second), capacity=stream.random.choice((0, 1, 2)), **given_settings) as made:
            await _take_otherwise(made, told, stream)
            assert await _ledgers(made) == in_memory


def _next(stream: OddStream, size: int) -> list[tuple[str, bytes, str]]:
    return [stream.message() for _ in range(size)]


async def _ask_everything(made: Bench, stream: OddStream) -> None:
    for run in RUNS:
        packet = await made.ask(run, "packet")
        assert "packet_id" in packet or packet["error"]["code"] in _ALLOWED_ERRORS, packet
        await made.ask(run, "status")
        wanted = stream.random.choice(IDS[:4])
        await made.ask(run, "authorize", operation_id=wanted, request_id="q", dry_run=True)
        await made.ask(run, "authorize", kind="mail.send", idempotency_key="k")
        await made.packets.publish(run, "changed")
    await made.ask("r1", "compact", reason=stream.text())


async def _take_otherwise(made: Bench, told: list[Delivery], stream: OddStream) -> None:
    """The same stream in other batches, memory let go now and then."""
    start = 0
    while start < len(told):
        size = stream.random.choice((1, 2, 50))
        await made.intake.take(told[start : start + size])
        start += size
        if stream.random.random() < 0.1:
            made.desk.runs.discard()
    await settled(made)


async def _ledgers(made: Bench) -> dict[str, str]:
    found = {}
    for run in RUNS:
        await made.desk.runs.load([run])
        if run in made.desk.runs.ledgers:
            found[run] = digest(ledger_value(made.desk.runs.ledgers[run]))
    return found

"""What is stored about one run, for a person or a program: read straight from the data directory.

Reads only and takes no lock, so it works beside a running daemon. It folds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sidecar.core import state
from sidecar.core.budget import BudgetSettings
from sidecar.core.protected import protected_digest, protected_view
from sidecar.logs import visible
from sidecar.view import View, ViewUnreadable, decode_view
from storage.records import TombstoneRow
from storage.store import Store


async def inspect_run(
    data_dir: Path, tenant: str, lanes: Sequence[str], run: str, settings: BudgetSettings
) -> dict[str, Any] | None:
    """Ledger, budget, checkpoints and receipts of a run; ``None`` if no lane looked at knows it.

    Raises ``StorageError`` if there is no database, none of ours, or one this user may not read.
    """
    async with await Store.open_to_read(data_dir) as store:
        for lane in lanes:
            family = await store.load_family(tenant, lane, run)
            found = next((row for row in family if row.run == run), None)
            if found is None:
                continue
            if not found.head:
                graves = {row.run: row for row in await store.tombstones(tenant, lane)}
                return {"tenant": tenant, "lane": lane, "run": run} | _forgotten(graves.get(run))
            ledgers = {row.run: _ledger(row) for row in family}
            view = _view(found.view)
            protected = protected_view(ledgers, run)
            checkpoints = await store.checkpoints(tenant, lane, run)
            receipts = await store.receipts(tenant, lane, run)
            return {
                "tenant": tenant,
                "lane": lane,
                "run": run,
                "family": [row.run for row in family],
                "ledger": state.ledger_value(ledgers[run]),
                "protected_digest": protected_digest(protected),
                "hash_chain": f"sha256:{found.chain.hex()}",
                "budget": {
                    "level": view.budget.level,
                    "used": view.budget.used(),
                    "usable": view.budget.usable(settings),
                    "window": view.budget.window,
                },
                "compaction": msgspec.structs.asdict(view.course),
                "violations": view.violations,
                "checkpoints": [
                    {
                        "id": row.checkpoint_id,
                        "version": row.version,
                        "covers_through": {"position": row.covers_through, "event_id": row.event_id},
                        "range_digest": row.range_digest,
                        "created_at": row.created_at,
                    }
                    for row in checkpoints
                ],
                "receipts": [msgspec.json.decode(row.body) for row in receipts],
            }
    return None


def _forgotten(grave: TombstoneRow | None) -> dict[str, Any]:
    """What is left of a forgotten run."""
    if grave is None:
        return {"forgotten": {}}
    return {"forgotten": {"at": grave.forgotten_at, **msgspec.json.decode(grave.body)}}


def _view(body: bytes) -> View:
    try:
        return decode_view(body)
    except ViewUnreadable:
        # Written by another version; the daemon begins it anew at its next start.
        return View()


def _ledger(row: Any) -> state.Ledger:
    ledger = state.Ledger(state.decode_head(row.head))
    for item in row.items:
        ledger.put(item.kind, state.decode_item(item.kind, item.body))
    return ledger


def render(found: dict[str, Any]) -> str:
    """The same as plain lines; every text of the run on one line with control characters made visible."""
    if "forgotten" in found:
        left = (f"  {name} {_short(value)}" for name, value in found["forgotten"].items())
        return "\n".join(
            [f"run {found['run']} (tenant {found['tenant']}, lane {found['lane']}) forgotten", *left]
        )
    head = found["ledger"]["head"]
    budget = found["budget"]
    lines = [
        f"run {found['run']} (tenant {found['tenant']}, lane {found['lane']})",
        f"  position {head['position']}, ledger version {head['version']}, "
        + (f"finished {head['finished']}" if head["finished"] else "open"),
        f"  budget {budget['used']:,} of {budget['usable']:,} usable ({budget['level']}), "
        f"window {budget['window']:,}",
        f"  protected {found['protected_digest']}",
        f"  hash chain {found['hash_chain']}",
    ]
    for kind, items in found["ledger"]["items"].items():
        lines.append(f"{kind} ({len(items)})")
        lines.extend(f"  {_line(item)}" for item in items)
    lines.append(f"checkpoints ({len(found['checkpoints'])})")
    lines.extend(
        f"  v{item['version']} {item['id']} covers 1 to {item['covers_through']['position']}"
        for item in found["checkpoints"]
    )
    lines.append(f"receipts ({len(found['receipts'])})")
    for receipt in found["receipts"]:
        span, tokens = receipt["range"], receipt["tokens"]
        lines.append(
            f"  {receipt['outcome']} {receipt['trigger']} {span['from']} to {span['through']}: "
            f"{tokens['before']:,} to {tokens['after']:,} tokens"
            + (f" ({receipt['reason']})" if receipt["reason"] else "")
        )
    counts = Counter(head["violations"]) + Counter(found["violations"])
    lines.append("violations: " + (", ".join(f"{code} {count}" for code, count in counts.items()) or "none"))
    return "\n".join(lines)


def _line(item: dict[str, Any]) -> str:
    shown = {name: value for name, value in item.items() if value not in (None, "", (), [], {})}
    return visible(" ".join(f"{name}={_short(value)}" for name, value in shown.items()))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 160 else f"{text[:160]}…"

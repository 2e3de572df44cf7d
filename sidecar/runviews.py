"""The runs as the operator's page lists them: read from memory, nothing loaded for it."""

from __future__ import annotations

from collections.abc import Iterable

from sidecar.admin import RunView
from sidecar.lane import LaneService


def run_views(lanes: Iterable[LaneService]) -> list[RunView]:
    """The hot runs of the lanes that are ours now."""
    views: list[RunView] = []
    for service in lanes:
        desk = service.desk
        if desk is None:
            continue
        for name, hot in desk.runs.hot.items():
            head, view = hot.ledger.head, hot.view
            views.append(
                RunView(
                    run=name,
                    lane=desk.lane,
                    level=view.budget.level,
                    used=view.budget.used(),
                    usable=view.budget.usable(desk.budget),
                    verdict=head.finished or view.published.verdict or "-",
                    checkpoint=view.course.checkpoint_version,
                    last_event=head.last_event_id or "",
                    goal=hot.ledger.task.goal,
                )
            )
    return views

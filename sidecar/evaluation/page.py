"""The report of an evaluation as one HTML file: tables, and charts as inline SVG.

Self-contained: no script, no font, no picture and no style from anywhere else. Every text of a file is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final

from sidecar.evaluation.evaluate import TITLES
from sidecar.evaluation.outcome import Evaluation, FactShares, Figures, mean_tokens, percent
from sidecar.evaluation.probes import HARMS

_COLOURS: Final = {
    "none": "#8a8f98",
    "last": "#c2571a",
    "trim": "#a67c00",
    "rolling": "#a8328f",
    "digest": "#1f6feb",
    "scripted": "#0e8a6d",
    "model": "#5b3fd6",
}
_DASHES: Final = {"none": "2 4", "last": "8 4", "trim": "2 2", "rolling": "10 3 2 3"}
_WIDTH, _HEIGHT = 640, 260
_LEFT, _BOTTOM, _TOP, _RIGHT = 48, 36, 14, 16

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5f6772; --line: #d5dae0; --ground: #ffffff; --bad: #b42318;
  --good: #0e7a4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa3ad; --line: #3a414a; --ground: #14171b;
  --bad: #ff8f85; --good: #5fd3a4; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p, figcaption { color: var(--soft); max-width: 46rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child, td.text, th.text { text-align: left; }
tr.ours td { font-weight: 600; } .bad { color: var(--bad); } .good { color: var(--good); }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .9rem; } .key svg { vertical-align: middle; }
li { margin: .15rem 0; }
"""


def render_page(found: Evaluation) -> str:
    """The whole page. Same evaluation, same bytes."""
    parts = [
        "<h1>How well does a run continue?</h1>",
        f"<p>{len(found.scenarios)} scenarios with known answers, {len(found.transcripts)} recorded runs. "
        "Every strategy gets the same messages and is shortened at the same moments.</p>",
        _verdict(found),
    ]
    if found.figures:
        parts += _scenarios(found.figures)
        parts += _each(found)
    if found.facts:
        parts += _transcripts(found)
    parts.append(_failures(found))
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Watchkeeper evaluation</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _verdict(found: Evaluation) -> str:
    if found.failures:
        return f'<p class="bad">{len(found.failures)} failures of Watchkeeper, listed below.</p>'
    return '<p class="good">Watchkeeper lost nothing that is protected and allowed nothing that is not.</p>'


def _scenarios(figures: Sequence[Figures]) -> list[str]:
    return [
        "<h2>What is left, in figures</h2>",
        _table(
            ["what is left by", "answers right", *(_SHORT[harm] for harm in HARMS), "tokens of the context"],
            [
                [
                    item.title,
                    percent(item.passed, item.probes),
                    *(str(item.harms.get(harm, 0)) for harm in HARMS),
                    f"{mean_tokens(item):,}",
                ]
                for item in figures
            ],
            ours=[item.watchkeeper for item in figures],
        ),
        "<h2>Drift: what must survive, after one compaction after the other</h2>",
        _key(figures),
        _figure(
            _chart(figures, lambda item: item.drift, "compactions", share=True),
            f"Share of the protected items that are still there, word for word, over the {figures[0].cohort} "
            "scenarios with so many compactions.",
        ),
        _figure(
            _chart(figures, lambda item: item.right, "compactions", share=True),
            "Share of right answers, likewise.",
        ),
        _figure(
            _chart(figures, lambda item: [float(value) for value in item.tokens], "compactions", share=False),
            "Tokens of the context, mean.",
        ),
        "<h2>Right answers, by what a scenario is about</h2>",
        _table(
            ["about", *(item.title for item in figures)],
            [
                [name.replace("_", " "), *(percent(*item.by_covers.get(name, (0, 0))) for item in figures)]
                for name in figures[0].by_covers
            ],
        ),
    ]


def _each(found: Evaluation) -> list[str]:
    """Right answers of every scenario, so that a figure can be followed to its cause."""
    counts: dict[tuple[str, str], list[int]] = {}
    for answer in found.answers:
        count = counts.setdefault((answer.scenario, answer.strategy), [0, 0])
        count[0] += answer.passed
        count[1] += 1
    names = [item.strategy for item in found.figures]
    rows = [
        [scenario.replace("_", " "), *(_of(counts.get((scenario, name), [0, 0])) for name in names)]
        for scenario in found.scenarios
    ]
    return [
        "<h2>Right answers, scenario by scenario</h2>",
        _table(["scenario", *(item.title for item in found.figures)], rows),
    ]


def _of(count: Sequence[int]) -> str:
    return f"{count[0]} of {count[1]}" if count[1] else "–"


_SHORT: Final = {
    "protected_lost": "protected texts lost",
    "disallowed_allowed": "disallowed allowed",
    "unknown_as_success": "unknown told as done",
    "fact_lost": "facts lost",
    "wrongly_refused": "wrongly refused",
    "wrong_state": "other wrong answers",
}


def _transcripts(found: Evaluation) -> list[str]:
    names = [name for name in TITLES if any(item.strategy == name for item in found.facts)]
    ordered = sorted(found.facts, key=lambda item: names.index(item.strategy))
    return [
        "<h2>Facts of recorded runs</h2>",
        "<p>Taken by rule from the part of each history that was compacted, and asked for afterwards.</p>",
        _figure(_bars(found.facts, names), "Facts of all kinds: in the context, by a ref, by search, lost."),
        _table(
            [
                "what is left by",
                "kind",
                "facts",
                "in context",
                "by a ref",
                "by search",
                "lost",
                "top 3 of search",
            ],
            [
                [
                    TITLES[item.strategy],
                    item.kind,
                    str(item.facts),
                    *(
                        percent(part, item.facts)
                        for part in (item.in_packet, item.by_ref, item.by_search, item.lost)
                    ),
                    percent(item.top3, item.facts) if item.top3 >= 0 else "–",
                ]
                for item in ordered
            ],
        ),
        _table(
            ["run", "messages", "covered", "compactions", "packet tokens"],
            [
                [
                    run.run,
                    str(run.messages),
                    str(run.covered),
                    str(run.compactions.made),
                    f"{run.packet_tokens:,}",
                ]
                for run in found.transcripts
            ],
        ),
    ]


def _failures(found: Evaluation) -> str:
    if not found.failures:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in found.failures)
    return f"<h2>Failures of Watchkeeper</h2><ul>{lines}</ul>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, ours: Sequence[bool] = ()) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"]
    for number, row in enumerate(rows):
        mark = ' class="ours"' if number < len(ours) and ours[number] else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _key(figures: Sequence[Figures]) -> str:
    items = "".join(
        f'<span><svg width="34" height="8"><line x1="0" y1="4" x2="34" y2="4" {_stroke(item.strategy)}/></svg> '
        f"{escape(item.title)}</span>"
        for item in figures
    )
    return f'<div class="key">{items}</div>'


def _stroke(strategy: str) -> str:
    dash = f' stroke-dasharray="{_DASHES[strategy]}"' if strategy in _DASHES else ""
    return f'stroke="{_COLOURS.get(strategy, "#444")}" stroke-width="2.5" fill="none"{dash}'


def _chart(
    figures: Sequence[Figures],
    values: Callable[[Figures], Sequence[float | None]],
    axis: str,
    *,
    share: bool,
) -> str:
    """Lines over the number of compactions; a share from 0 to 100 per cent, else from 0 to the largest value."""
    lines = {item.strategy: list(values(item)) for item in figures}
    last = max((len(points) for points in lines.values()), default=1) - 1
    told = [value for points in lines.values() for value in points if value is not None]
    top = 1.0 if share else max(told, default=1.0) or 1.0

    def x(number: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * (number / last if last else 0), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top, 1)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">']
    for part in range(5):
        value = top * part / 4
        label = f"{value * 100:.0f} %" if share else f"{value:,.0f}"
        parts.append(
            f'<line x1="{_LEFT}" y1="{y(value)}" x2="{_WIDTH - _RIGHT}" y2="{y(value)}" stroke="var(--line)"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{label}</text>'
        )
    parts += [
        f'<text x="{x(number)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{number}</text>'
        for number in range(last + 1)
    ]
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{escape(axis)}</text>')
    for strategy, points in lines.items():
        places = [f"{x(number)},{y(value)}" for number, value in enumerate(points) if value is not None]
        title = f"<title>{escape(TITLES.get(strategy, strategy))}</title>"
        parts.append(f'<polyline points="{" ".join(places)}" {_stroke(strategy)}>{title}</polyline>')
    parts.append("</svg>")
    return "".join(parts)


_SHARES: Final = (
    ("in_packet", "#1f6feb"),
    ("by_ref", "#58a6ff"),
    ("by_search", "#a5d0ff"),
    ("lost", "#d1443a"),
)


def _bars(facts: Sequence[FactShares], names: Sequence[str]) -> str:
    """One bar for each strategy, its four shares side by side."""
    row, label, width = 30, 210, 380
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {row * len(names)}" width="{_WIDTH}" height="{row * len(names)}" role="img">'
    ]
    for number, name in enumerate(names):
        its = [item for item in facts if item.strategy == name]
        total = sum(item.facts for item in its) or 1
        at = float(label)
        parts.append(
            f'<text x="{label - 8}" y="{number * row + 19}" text-anchor="end">{escape(TITLES[name])}</text>'
        )
        for field, colour in _SHARES:
            part = sum(getattr(item, field) for item in its)
            size = round(width * part / total, 1)
            title = f"<title>{field.replace('_', ' ')}: {percent(part, total)}</title>"
            parts.append(
                f'<rect x="{round(at, 1)}" y="{number * row + 5}" width="{size}" height="{row - 10}" '
                f'fill="{colour}">{title}</rect>'
            )
            at += size
    parts.append("</svg>")
    return "".join(parts)

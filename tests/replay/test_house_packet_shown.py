"""The packet in the README is the one the bundled sample ends with."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from support.pages import ROOT

SAMPLE = ROOT / "sidecar" / "samples" / "night_watch.jsonl"


def test_every_line_of_the_readmes_packet_is_real() -> None:
    found = re.search(r"<!-- packet text -->\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    done = subprocess.run(
        [sys.executable, "-m", "sidecar", "replay", str(SAMPLE), "--window", "32000", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (report,) = json.loads(done.stdout)["runs"]
    assert sum(compaction["outcome"] == "applied" for compaction in report["compactions"]) >= 3
    real = report["packet"]["text"].splitlines()
    shown = [line for line in found[1].splitlines() if line != "…"]
    assert [line for line in shown if line not in real] == []
    places = [real.index(line) for line in shown]
    assert places == sorted(places)

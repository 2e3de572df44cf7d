"""A real Prometheus beside a test: scrapes what it is told to, evaluates the shipped rules with time made short.

Durations of the rules, ``for`` and ranges alike, are divided by ``FASTER``; thresholds stay. So an alert that must
hold for ten minutes must hold for ten seconds here, and a count within a quarter of an hour is one within 15 s.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx
import pytest

from support.alert_cases import RULES
from support.nats_server import free_port, wait_until

FASTER: Final = 60
SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RANGE = re.compile(r"\[(\d+)([smhd])\]")
_FOR = re.compile(r"^(\s*for: )(\d+)([smhd])$", re.MULTILINE)


def shorter(rules: str, by: int = FASTER) -> str:
    """The rules with every duration divided: ranges, of which none gets shorter than 5 s, and ``for``."""

    def short(number: str, unit: str, least: float) -> str:
        return f"{max(least, int(number) * SECONDS[unit] / by) * 1000:.0f}ms"

    text = _RANGE.sub(lambda found: f"[{short(found[1], found[2], 5)}]", rules)
    return _FOR.sub(lambda found: f"{found[1]}{short(found[2], found[3], 0)}", text)


class Prometheus:
    """One server with its files in ``folder``. ``targets``: instance → address of its admin port."""

    def __init__(self, folder: Path, targets: Mapping[str, str]) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            pytest.skip("prometheus is not installed: apt-get install prometheus")
        self._binary = binary
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rules.yaml").write_text(shorter(RULES.read_text()))
        jobs = [{"targets": [address], "labels": {"instance": name}} for name, address in targets.items()]
        scraped = {"job_name": "watchkeeper", "static_configs": jobs}
        times = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        config = {"global": times, "rule_files": ["rules.yaml"], "scrape_configs": [scraped]}
        # JSON is YAML as well.
        (folder / "prometheus.yml").write_text(json.dumps(config))

    def __enter__(self) -> Prometheus:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--enable-feature=exemplar-storage",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        wait_until(self._is_ready, "start of prometheus", 60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"prometheus ended: {(self._folder / 'log').read_text()}")
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/-/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **parameters: str | float) -> Any:
        """The data of one answer of its HTTP interface; an error fails the test with its words."""
        answer = httpx.get(
            f"http://127.0.0.1:{self.port}/api/v1/{path}", params=parameters, trust_env=False, timeout=30
        )
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def series(self, query: str) -> list[tuple[dict[str, str], float]]:
        """An instant query: labels and value of each series."""
        found = self.get("query", query=query)["result"]
        return [(item["metric"], float(item["value"][1])) for item in found]

    def points(
        self, query: str, start: float, end: float, step: float = 1.0
    ) -> list[tuple[dict[str, str], Any]]:
        """A range query: labels and (time, value) pairs of each series, what is no number left out."""
        found = self.get("query_range", query=query, start=start, end=end, step=step)["result"]
        pairs = [
            (
                item["metric"],
                [(at, float(value)) for at, value in item["values"] if math.isfinite(float(value))],
            )
            for item in found
        ]
        return [(labels, values) for labels, values in pairs if values]

    def firing(self) -> set[tuple[str, str]]:
        """Name (without prefix) and instance of every alert that fires now; no instance is an empty text."""
        return {
            (item["labels"]["alertname"].removeprefix("Watchkeeper"), item["labels"].get("instance", ""))
            for item in self.get("alerts")["alerts"]
            if item["state"] == "firing"
        }

    def exemplars(self, query: str, start: float, end: float) -> Sequence[Mapping[str, Any]]:
        """Series labels with their exemplars."""
        found: list[Mapping[str, Any]] = self.get("query_exemplars", query=query, start=start, end=end)
        return found

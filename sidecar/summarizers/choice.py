"""Which summariser the configuration asks for, and what takes its place when it keeps failing."""

from __future__ import annotations

from sidecar.config import Config, ConfigError, Problem
from sidecar.summarizers import Summarizer
from sidecar.summarizers.digest import DigestSummarizer


def build_summarizers(config: Config) -> tuple[Summarizer, Summarizer | None]:
    """The configured summariser and its fallback. Raises ``ConfigError`` for a kind this build lacks."""
    kind = config.summarizer.kind
    if kind != "digest":
        raise ConfigError(
            [
                Problem(
                    key="summarizer.kind",
                    source=config.sources.get("summarizer.kind", "default"),
                    value=kind,
                    allowed="digest (other kinds are not part of this build)",
                )
            ]
        )
    digest = DigestSummarizer()
    return digest, digest if config.summarizer.fallback == "digest" else None

"""Which summariser the configuration asks for, and what takes its place when it keeps failing.

The libraries of model providers are optional and are loaded only where one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

from sidecar.config import Config, ConfigError, Problem
from sidecar.core.tokens import bytes_tokens
from sidecar.extras import how_to_install
from sidecar.summarizers import Summarizer, instructions
from sidecar.summarizers.digest import DigestSummarizer
from sidecar.summarizers.nats import NatsSummarizer, Wire

LEAST_WINDOW: Final = bytes_tokens(len(instructions.INSTRUCTIONS)) + 3_000
"""Tokens a model's request must have room for: the instructions, a ledger, two summaries, some history."""
PROVIDERS: Final = ("openai", "anthropic")
"""Kinds that need the library of their name, which an extra of the same name brings."""


def check_summarizers(config: Config) -> None:
    """Raise ``ConfigError`` for what could not be built or would never work; asks nobody."""
    kind = config.summarizer.kind
    if kind == "digest":
        return
    problems: list[Problem] = []
    if config.summarizer.window_tokens < LEAST_WINDOW:
        allowed = f"{LEAST_WINDOW} or more when summarizer.kind is {kind}"
        problems.append(_problem(config, "summarizer.window_tokens", allowed))
    if kind in PROVIDERS:
        try:
            import_module(kind)
        except ImportError:
            allowed = f"{kind} only with its library: {how_to_install(kind)}"
            problems.append(_problem(config, "summarizer.kind", allowed))
    if problems:
        raise ConfigError(problems)


def build_summarizers(
    config: Config, wire: Wire | None = None, lane: str = "", on_late: Callable[[], None] | None = None
) -> tuple[Summarizer, Summarizer | None]:
    """The configured summariser of a lane and its fallback. Kind ``nats`` needs the connection; ``on_late`` is
    called for each of its answers that came too late. Raises as ``check_summarizers`` does."""
    check_summarizers(config)
    settings = config.summarizer
    digest = DigestSummarizer()
    primary: Summarizer = digest
    match settings.kind:
        case "digest":
            pass
        case "nats":
            if wire is None:
                raise ValueError("a summariser over NATS needs a connection")
            primary = NatsSummarizer(
                wire,
                config.tenant,
                lane,
                window_tokens=settings.window_tokens,
                model=settings.model,
                on_late=on_late,
            )
        case "openai":
            from sidecar.summarizers.openai import OpenAISummarizer

            primary = OpenAISummarizer(settings)
        case "anthropic":
            from sidecar.summarizers.anthropic import AnthropicSummarizer

            primary = AnthropicSummarizer(settings)
    return primary, digest if settings.fallback == "digest" else None


def _problem(config: Config, key: str, allowed: str) -> Problem:
    return Problem(
        key=key,
        source=config.sources.get(key, "default"),
        value=str(config.value(key)),
        allowed=allowed,
    )

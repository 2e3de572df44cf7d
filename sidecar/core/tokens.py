"""How many tokens an event takes in a model's context, before anything was learnt about the run.

UTF-8 bytes / 4, kept apart by kind of content, because the factor between that and a provider's count differs
by kind (JSON and logs weigh more than prose). Only lengths are looked at: no pattern, no tokenizer, no I/O.
What is no message, call or result takes nothing, since it is not in the model's prompt.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Struct

from protocol.content import Content, DataPart, ImagePart, ReasoningPart, TextPart
from protocol.events import Event, Message, ToolCalled, ToolReturned

Kind = Literal["prose", "data", "reasoning", "image"]
KINDS: Final[tuple[Kind, ...]] = ("prose", "data", "reasoning", "image")

BYTES_PER_TOKEN: Final = 4
IMAGE_TOKENS: Final = 1_600
"""An image that does not say what it costs: about the most one image costs at today's providers."""
HIDDEN_REASONING_TOKENS: Final = 0
"""Reasoning with neither text nor count: nothing is known, and most providers drop it from later prompts."""
MOST_OF_PART: Final = 10_000_000
"""Of what one part says that it costs: more than any window is nonsense, and must not blind the run."""
MOST_TOKENS: Final = 2**48
"""Of one kind, all events together; a sum that cannot grow further is better than one nobody can store."""

_encode = msgspec.json.Encoder().encode


class Estimate(Struct, frozen=True, array_like=True, gc=False):
    """Estimated tokens by kind of content. Adds up, subtracts, and is weighed by factors."""

    prose: int = 0
    data: int = 0
    reasoning: int = 0
    image: int = 0

    @property
    def tokens(self) -> int:
        """All kinds together, every factor 1."""
        return self.prose + self.data + self.reasoning + self.image

    @property
    def kind(self) -> Kind:
        """The kind most of it is; ``prose`` for nothing."""
        most = max(self.prose, self.data, self.reasoning, self.image)
        if self.prose == most:
            return "prose"
        if self.data == most:
            return "data"
        return "reasoning" if self.reasoning == most else "image"

    def of(self, kind: Kind) -> int:
        return int(getattr(self, kind))

    def __add__(self, other: Estimate) -> Estimate:
        prose, data = self.prose + other.prose, self.data + other.data
        reasoning, image = self.reasoning + other.reasoning, self.image + other.image
        # Four comparisons instead of four calls: this runs for every event.
        return Estimate(
            prose if prose < MOST_TOKENS else MOST_TOKENS,
            data if data < MOST_TOKENS else MOST_TOKENS,
            reasoning if reasoning < MOST_TOKENS else MOST_TOKENS,
            image if image < MOST_TOKENS else MOST_TOKENS,
        )

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate(
            self.prose - other.prose,
            self.data - other.data,
            self.reasoning - other.reasoning,
            self.image - other.image,
        )


NOTHING: Final = Estimate()


def text_tokens(text: str) -> int:
    """Tokens of a text: UTF-8 bytes / 4, rounded up."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return -(-size // BYTES_PER_TOKEN)


def bytes_tokens(size: int) -> int:
    """Tokens of that many bytes, rounded up."""
    return -(-size // BYTES_PER_TOKEN)


def value_tokens(value: object) -> int:
    """Tokens of any value as the compact JSON it would be sent as."""
    return bytes_tokens(len(_encode(value)))


def estimate(event: Event) -> Estimate:
    """Tokens of one event by kind; linear in its size, nothing else. Zero for what a prompt never holds."""
    return added(NOTHING, event)


def added(total: Estimate, event: Event) -> Estimate:
    """``total`` and what the event takes; ``total`` itself for what a prompt never holds.

    One object where the sum of two estimates would make two: this runs for every event.
    """
    # By the exact type: that something is no instance of a class takes six times as long to find out.
    if type(event) is Message:
        content = event.content
        if not isinstance(content, str) or event.blob is not None:
            return total + _apart(_content(content, "prose"), event, "prose")
        prose = total.prose + text_tokens(content)
        return Estimate(
            prose if prose < MOST_TOKENS else MOST_TOKENS, total.data, total.reasoning, total.image
        )
    if type(event) is ToolReturned:
        content = event.content
        if not isinstance(content, str) or event.blob is not None:
            return total + _apart(_content(content, "data"), event, "data")
        data = total.data + text_tokens(content)
    elif type(event) is ToolCalled:
        data = total.data + text_tokens(event.tool) + bytes_tokens(len(bytes(event.arguments)))
    else:
        return total
    return Estimate(total.prose, data if data < MOST_TOKENS else MOST_TOKENS, total.reasoning, total.image)


def _apart(given: Estimate, event: Message | ToolReturned, plain: Kind) -> Estimate:
    """With what is kept apart, since the prompt had all of it unless the event says that it was cut."""
    if event.blob is None or (isinstance(event, ToolReturned) and event.truncated):
        return given
    rest = bytes_tokens(event.blob.bytes) - given.of(plain)
    if rest <= 0:
        return given
    return given + (Estimate(prose=rest) if plain == "prose" else Estimate(data=rest))


def _content(content: Content, plain: Kind) -> Estimate:
    if isinstance(content, str):
        tokens = text_tokens(content)
        return Estimate(prose=tokens) if plain == "prose" else Estimate(data=tokens)
    text = data = reasoning = image = 0
    for part in content:
        if type(part) is TextPart:
            text += text_tokens(part.text)
        elif type(part) is DataPart:
            data += bytes_tokens(len(bytes(part.value)))
        elif type(part) is ReasoningPart:
            if part.tokens is not None:
                reasoning += min(part.tokens, MOST_OF_PART)
            elif part.text is not None:
                reasoning += text_tokens(part.text)
            else:
                reasoning += HIDDEN_REASONING_TOKENS
        elif type(part) is ImagePart:
            image += IMAGE_TOKENS if part.tokens is None else min(part.tokens, MOST_OF_PART)
    if plain == "prose":
        return Estimate(text, data, reasoning, image)
    return Estimate(0, text + data, reasoning, image)

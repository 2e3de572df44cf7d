"""Made-up secrets of every kind, each inside a sentence as it might stand in a transcript.

Nothing here opens anything: all of it is drawn by a seeded generator, put together from halves so that no tool
that looks for secrets in sources finds one.
"""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

LETTERS = string.ascii_letters
DIGITS = string.digits
WORD = LETTERS + DIGITS
BASE32 = string.ascii_uppercase + "234567"
HEX = "0123456789abcdef"
URL = WORD + "-_"


@dataclass(frozen=True)
class Planted:
    """One secret: what must never be seen again, where it stood, and the mark expected there."""

    kind: str
    secret: str
    text: str


class Draw:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of(self, alphabet: str, length: int) -> str:
        """So many letters, with a digit and a letter among them."""
        drawn = [self._random.choice(alphabet) for _ in range(length)]
        drawn[length // 2], drawn[length // 3] = "7", alphabet[0]
        return "".join(drawn)

    def pick(self, *texts: str) -> str:
        return self._random.choice(texts)


def _pem(draw: Draw) -> tuple[str, str]:
    lines = [draw.of(WORD + "+/", 64) for _ in range(6)]
    name = draw.pick("RSA ", "EC ", "OPENSSH ", "")
    body = "\n".join([*lines, draw.of(WORD, 30) + "=="])
    return lines[2], f"-----BEGIN {name}PRIVATE KEY-----\n{body}\n-----END {name}PRIVATE KEY-----"


def _jwt(draw: Draw) -> str:
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("=")
    return f"{head}.ey" + f"J{draw.of(URL, 60)}.{draw.of(URL, 43)}"


def _basic(draw: Draw) -> str:
    return base64.b64encode(f"bob:{draw.of(WORD, 14)}".encode()).decode()


_KINDS: dict[str, Callable[[Draw], tuple[str, str]]] = {
    "private_key": _pem,
    "jwt": lambda d: (s := _jwt(d), f"the cookie held {s} until noon"),
    "anthropic_key": lambda d: (s := "sk-" + "ant-api03-" + d.of(URL, 60), f"I used {s}."),
    "openai_key": lambda d: (s := "sk-" + "proj-" + d.of(URL, 48), f"client = Client('{s}')"),
    "stripe_key": lambda d: (s := "sk_" + "live_" + d.of(WORD, 24), f"stripe says {s}\nis wrong"),
    "github_token": lambda d: (s := d.pick("gh" + "p_", "gh" + "s_") + d.of(WORD, 36), f"git remote: {s}"),
    "gitlab_token": lambda d: (s := "gl" + "pat-" + d.of(URL, 20), f"({s})"),
    "aws_key": lambda d: (s := "AK" + "IA" + d.of(BASE32, 16), f"id {s} in eu-west-1"),
    "google_key": lambda d: (s := "AI" + "za" + d.of(URL, 35), f"maps?key={s}&v=3"),
    "azure_key": lambda d: (s := d.of(WORD + "+/", 86) + "==", "AccountName=x;Account" + f"Key={s};End=y"),
    "slack_token": lambda d: (s := "xo" + "xb-" + d.of(DIGITS, 12) + "-" + d.of(WORD, 24), f"slack: {s}"),
    "telegram_token": lambda d: (
        s := f"{d.of(DIGITS, 9).replace('0', '1')[:9]}:{d.of(URL, 34)}Q",
        f"bot {s} answers",
    ),
    "npm_token": lambda d: (s := "np" + "m_" + d.of(WORD, 36), f"//registry.invalid/:_auth {s}"),
    "pypi_token": lambda d: (s := "py" + "pi-AgEI" + d.of(URL, 80), f"twine -u __t__ {s}"),
    "huggingface_token": lambda d: (s := "h" + "f_" + d.of(WORD, 34), f"login {s}"),
    "sendgrid_key": lambda d: (s := "S" + f"G.{d.of(URL, 22)}.{d.of(URL, 43)}", f"mail with {s}"),
    "nats_seed": lambda d: (s := "SU" + "A" + d.of(BASE32, 55), f"seed:\n{s}\n"),
    "provider_key": lambda d: (s := "gs" + "k_" + d.of(WORD, 52), f"groq {s}"),
    "bearer": lambda d: (s := d.of(URL, 32), f"curl -H 'Authorization: Bearer {s}' http://a.invalid"),
    "basic_auth": lambda d: (s := _basic(d), f"Authorization: Basic {s}"),
    "url_password": lambda d: (s := d.of(WORD + "!.", 12), f"postgres://bob:{s}@db.invalid:5432/app is up"),
    "password": lambda d: (
        s := d.of(WORD + "!#%", 11),
        d.pick(
            f"DB_PASSWORD={s}",
            f'{{"password": "{s}", "user": "bob"}}',
            f"password: {s}\nuser: bob",
            f"mysql --password {s} -u bob",
            f"<password>{s}</password>",
            f"passwd = '{s}'",
            json_in_json("password", s),
        ),
    ),
    "secret": lambda d: (
        s := d.of(WORD, 24),
        d.pick(f"client_secret={s}&grant=x", f'"clientSecret" : "{s}"', f"export APP_SECRET_KEY={s}"),
    ),
    "token": lambda d: (
        s := d.of(WORD, 20),
        d.pick(f'{{"access_token":"{s}"}}', f"refresh_token: {s}", f"GET /x?token={s}&page=2"),
    ),
    "api_key": lambda d: (
        s := d.of(WORD, 28),
        d.pick(f"api_key = '{s}'", f"x-api-key: {s}", f'"apiKey": "{s}",', f"ACME_API_KEY={s}"),
    ),
}


def json_in_json(name: str, value: str) -> str:
    """As it stands where one tool's output quotes another's."""
    return '{\\"' + name + '\\": \\"' + value + '\\"}'


KINDS = tuple(_KINDS)


def planted(count: int, seed: int = 1) -> list[Planted]:
    """So many secrets, all kinds in turn."""
    draw = Draw(seed)
    made = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        secret, text = _KINDS[kind](draw)
        made.append(Planted(kind, secret, text))
    return made

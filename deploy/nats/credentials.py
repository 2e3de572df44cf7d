"""Makes what a test cluster needs to tell its parties apart: keys, signed accounts, and a credentials file each.

    .venv/bin/python deploy/nats/credentials.py FOLDER --lane watchkeeper-0 --lane sample-agent

It needs the library nkeys alone, which the daemon installs: hence the Python of the daemon's environment.
Where you have NSC or an account server of your own, make the users there, with the permissions that ``--show``
prints. Nothing that exists is overwritten.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import nkeys
except ModuleNotFoundError:
    # To show the permissions, and to explain itself, it needs no library.
    nkeys = None  # type: ignore[assignment]

STREAMS = ("WK_IN", "WK_OUT", "WK_REJECTED", "WK_STATE")
BUCKETS = ("WK_BLOBS", "WK_CONTENT")
ANSWER_SECONDS = 3600
_NAME = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,127}")


def keeper(tenant: str) -> dict[str, list[str]]:
    """The daemon: the whole tenant, as the sidecar only, and its own streams, none of which it may delete."""
    managed = [*STREAMS, *(f"OBJ_{bucket}" for bucket in BUCKETS)]
    verbs = ("STREAM.INFO", "STREAM.CREATE", "STREAM.PURGE", "STREAM.MSG.GET", "DIRECT.GET")
    return {
        "publish": [
            f"wk.v1.in.{tenant}.*.*.record",
            f"wk.v1.out.{tenant}.>",
            f"wk.v1.state.{tenant}.>",
            f"wk.v1.summarize.{tenant}.>",
            "$JS.API.INFO",
            *(f"$JS.API.{verb}.{stream}" for verb in verbs for stream in managed),
            *(f"$JS.API.DIRECT.GET.{stream}.>" for stream in managed),
            *(
                f"$JS.API.CONSUMER.{verb}.{stream}.>"
                for verb in ("CREATE", "INFO", "DELETE", "MSG.NEXT")
                for stream in ("WK_IN", "OBJ_WK_BLOBS")
            ),
            *(f"$O.{bucket}.>" for bucket in BUCKETS),
            # The client's own reader of objects.
            "$JS.API.STREAM.NAMES",
            "$JS.API.CONSUMER.CREATE.OBJ_WK_BLOBS",
            "$JS.FC.OBJ_WK_BLOBS.>",
            # Questions from other accounts come with a reply subject of the server's making.
            "_R_.>",
            "_INBOX.>",
        ],
        "subscribe": [f"wk.v1.ask.{tenant}.>", "$SRV.>", "_INBOX.>"],
    }


def summarizer(tenant: str) -> dict[str, list[str]]:
    """Who writes summaries (kind ``nats``): it answers what the daemon asks it, once each, and says nothing else."""
    return {"publish": [], "subscribe": [f"wk.v1.summarize.{tenant}.>"]}


def agent(tenant: str, lane: str) -> dict[str, list[str]]:
    """An agent: events, questions and large texts of its lane, never another channel."""
    return {
        "publish": [
            f"wk.v1.in.{tenant}.{lane}.*.event",
            f"wk.v1.ask.{tenant}.{lane}.*.*",
            f"$O.WK_CONTENT.C.{tenant}.{lane}.*.*",
            "$O.WK_CONTENT.M.*",
            # Its newest packet, without asking the daemon.
            f"$JS.API.DIRECT.GET.WK_OUT.wk.v1.out.{tenant}.{lane}.*.packet",
        ],
        "subscribe": [f"wk.v1.out.{tenant}.{lane}.>"],
    }


def authority(tenant: str) -> dict[str, list[str]]:
    """Who decides over agents: the authority channel of the whole tenant."""
    return {
        "publish": [f"wk.v1.in.{tenant}.*.*.authority"],
        "subscribe": [f"wk.v1.out.{tenant}.>"],
    }


def guests(tenant: str, lanes: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Everyone who is not trusted as the daemon is. Each has an account of its own, joined to the daemon's by
    exactly these subjects.

    In one account a publisher chooses where the broker's acknowledgement and the daemon's answer go, and whatever
    subject it names is stored as if it had been published there. Across accounts such a subject is its own.
    """
    agents = {f"agent-{lane}": agent(tenant, lane) for lane in lanes}
    return {"authority": authority(tenant), **agents}


class Signer:
    """One party that signs: an operator, an account or a user."""

    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(os.urandom(32), prefix)
        self._pair = nkeys.from_seed(self.seed)
        self.public: str = self._pair.public_key.decode().rstrip("=")

    def token(self, subject: str, name: str, claims: dict[str, Any]) -> str:
        """A signed statement about ``subject``."""
        body: dict[str, Any] = {
            "iat": int(time.time()),
            "iss": self.public,
            "name": name,
            "sub": subject,
            "nats": {"version": 2, **claims},
        }
        digest = hashlib.sha256(json.dumps(body).encode()).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(body)}"
        return f"{signed}.{_encoded(self._pair.sign(signed.encode()))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _part(value: dict[str, Any]) -> str:
    return _encoded(json.dumps(value, separators=(",", ":")).encode())


def _account(operator: Signer, account: Signer, name: str, storage: int, **joined: list[Any]) -> str:
    limits = {
        **dict.fromkeys(("subs", "conn", "leaf", "imports", "exports", "data", "payload"), -1),
        **dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), storage),
        "wildcards": True,
    }
    return operator.token(account.public, name, {"type": "account", "limits": limits, **joined})


def _exports(tenant: str) -> list[dict[str, Any]]:
    """What the daemon's account offers to others: to publish to is a service, to listen to a stream.

    Their imports, which the operator signs, say which lanes each may use of it.
    """
    anywhere = agent(tenant, "*")
    services = [*anywhere["publish"], *authority(tenant)["publish"]]
    return [
        *({"name": subject, "subject": subject, "type": "service"} for subject in services),
        {"name": "out", "subject": f"wk.v1.out.{tenant}.>", "type": "stream"},
    ]


def _imports(keeper: Signer, may: dict[str, list[str]]) -> list[dict[str, Any]]:
    kinds = [("service", subject) for subject in may["publish"]]
    kinds += [("stream", subject) for subject in may["subscribe"]]
    return [
        {
            "name": subject,
            "subject": subject,
            "account": keeper.public,
            "type": kind,
            "local_subject": subject,
        }
        for kind, subject in kinds
    ]


def _user(account: Signer, name: str, may: dict[str, list[str]]) -> str:
    """Contents of a credentials file."""
    user = Signer(nkeys.PREFIX_BYTE_USER)
    unlimited = dict.fromkeys(("subs", "data", "payload"), -1)
    allowed: dict[str, Any] = {"pub": {"allow": may["publish"]}, "sub": {"allow": may["subscribe"]}}
    if not may["publish"]:
        allowed = {**allowed, "pub": {}, "resp": {"max": 1, "ttl": ANSWER_SECONDS * 1_000_000_000}}
    token = account.token(user.public, name, {"type": "user", **allowed, **unlimited})
    seed = user.seed.decode()
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def make(tenant: str, lanes: Sequence[str]) -> dict[str, str]:
    """Name of each file → its text. ``auth.conf`` is for a nats-server, ``values-auth.yaml`` for its chart."""
    operator = Signer(nkeys.PREFIX_BYTE_OPERATOR)
    parties = guests(tenant, lanes)
    accounts = {name: Signer(nkeys.PREFIX_BYTE_ACCOUNT) for name in ("system", "keeper", *parties)}
    system, own = accounts["system"].public, accounts["keeper"]
    tokens = {
        system: _account(operator, accounts["system"], "system", 0),
        own.public: _account(operator, own, "keeper", -1, exports=_exports(tenant)),
    }
    files = {
        "keeper.creds": _user(own, "keeper", keeper(tenant)),
        "summarizer.creds": _user(own, "summarizer", summarizer(tenant)),
    }
    for name, may in parties.items():
        tokens[accounts[name].public] = _account(
            operator, accounts[name], name, 0, imports=_imports(own, may)
        )
        # Answers come to its own inboxes; nobody else is in its account.
        files[f"{name}.creds"] = _user(
            accounts[name], name, {**may, "subscribe": [*may["subscribe"], "_INBOX.>"]}
        )
    # JSON is a form of both the server's configuration and of YAML.
    auth = {
        "operator": operator.token(
            operator.public, "watchkeeper", {"type": "operator", "system_account": system}
        ),
        "system_account": system,
        "resolver": "MEMORY",
        "resolver_preload": tokens,
    }
    files["auth.conf"] = "".join(f"{key}: {json.dumps(value)}\n" for key, value in auth.items())
    files["values-auth.yaml"] = json.dumps({"config": {"merge": auth}}, indent=2) + "\n"
    files |= {f"{name}.account.seed": f"{signer.seed.decode()}\n" for name, signer in accounts.items()}
    return files | {"operator.seed": f"{operator.seed.decode()}\n"}


def _name(text: str) -> str:
    """A tenant or lane as it stands in subjects and in names of files."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: letters, digits, - and _, at most 128, not beginning with _, are allowed"
        )
    return text


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(mode=0o700)
    for name, text in files.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)
        print(folder / name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Credentials for a NATS test cluster of Watchkeeper.")
    parser.add_argument("folder", type=Path, nargs="?", help="where to write; it must not exist")
    parser.add_argument("--tenant", type=_name, default="default")
    parser.add_argument(
        "--lane", dest="lanes", type=_name, action="append", help="a lane with an agent; may be repeated"
    )
    parser.add_argument("--show", action="store_true", help="print who may what, and write nothing")
    given = parser.parse_args(arguments)
    lanes = given.lanes or ["main"]
    if given.show:
        own = {"keeper": keeper(given.tenant), "summarizer": summarizer(given.tenant)}
        print(json.dumps({**own, **guests(given.tenant, lanes)}, indent=2))
        return
    if given.folder is None:
        parser.error("give a folder, or --show")
    if nkeys is None:
        parser.error(
            f"{sys.executable} has no library nkeys: use the Python the daemon is installed in "
            "(.venv/bin/python in a clone), or install nkeys for this one"
        )
    try:
        _write(given.folder, make(given.tenant, lanes))
    except FileExistsError:
        parser.error(f"{given.folder} exists and is not overwritten: name another folder, or move it away")
    except OSError as error:
        parser.error(f"{error.filename or given.folder}: {error.strerror}")


if __name__ == "__main__":
    main()

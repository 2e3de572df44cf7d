"""The broker as the runbook sets it up: who may say what, over TLS with real certificates and signed users.

The keys and permissions come from the script of ``deploy/nats``, the agent is the sample of the manifests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import nats
import pytest
import trustme
import yaml
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from protocol import subjects
from sidecar.transport.blobs import Blobs
from sidecar.transport.contents import ensure_contents
from sidecar.transport.inventory import purge, subjects_held
from sidecar.transport.jetstream import Link, LinkSettings
from sidecar.transport.topology import ensure_streams
from support.daemon import DaemonProcess
from support.links import States, eventually
from support.nats_server import NatsServer
from support.pages import ROOT

pytestmark = pytest.mark.anyio

NATS = ROOT / "deploy" / "nats"
SAMPLE_AGENT = ROOT / "deploy" / "kubernetes" / "overlays" / "sidecar" / "agent.py"
RUN = "default.main.r"

credentials: dict[str, Any] = runpy.run_path(str(NATS / "credentials.py"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes for two lanes."""
    folder = tmp_path_factory.mktemp("keys") / "made"
    done = subprocess.run(
        [sys.executable, str(NATS / "credentials.py"), str(folder), "--lane", "main", "--lane", "other"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{made}"], "exists and is not overwritten: name another folder"),
        (["{made}/no/folder"], "{made}/no/folder: No such file or directory"),
        (["{made}/new", "--lane", "a b"], "argument --lane: 'a b': letters, digits, - and _"),
        (["{made}/new", "--lane", "../up"], "argument --lane: '../up': letters"),
        (["{made}/new", "--tenant", "*"], "argument --tenant: '*': letters"),
    ],
)
def test_the_script_refuses_in_one_line_and_writes_nothing(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    given = [text.format(made=tmp_path) for text in arguments]
    ended = subprocess.run(
        [sys.executable, str(NATS / "credentials.py"), *given], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said.format(made=tmp_path) in ended.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_without_its_library_the_script_says_with_which_python_it_runs(tmp_path: Path) -> None:
    # Isolated from what is installed: only the standard library is found.
    bare = [sys.executable, "-I", "-S", str(NATS / "credentials.py")]
    ended = subprocess.run([*bare, str(tmp_path / "keys")], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ".venv/bin/python in a clone" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "keys").exists()
    shown = subprocess.run([*bare, "--show"], capture_output=True, text=True, check=False)
    assert set(json.loads(shown.stdout)) == {"keeper", "summarizer", "authority", "agent-main"}


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(ca: trustme.CA, tmp_path: Path) -> Path:
    """The authority's certificate, as a daemon and an agent get it."""
    path = tmp_path / "ca.crt"
    ca.cert_pem.write_to_path(str(path))
    return path


def secured(ca: trustme.CA, folder: Path, keys: Path, *, clients_too: bool = False) -> str:
    """Configuration of a server with a certificate of its own and the script's accounts."""
    (folder / "server").mkdir(exist_ok=True)
    leaf = ca.issue_cert("127.0.0.1", "localhost")
    certificate, key, root = (folder / "server" / name for name in ("tls.crt", "tls.key", "ca.crt"))
    leaf.private_key_pem.write_to_path(str(key))
    certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    ca.cert_pem.write_to_path(str(root))
    verify = f'ca_file: "{root}"\n  verify: true' if clients_too else ""
    tls = f'tls {{\n  cert_file: "{certificate}"\n  key_file: "{key}"\n  {verify}\n}}\n'
    return tls + (keys / "auth.conf").read_text()


def tls_url(server: NatsServer) -> str:
    return server.url.replace("nats://", "tls://")


@pytest.fixture
def server(ca: trustme.CA, keys: Path, tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(config=secured(ca, tmp_path, keys)) as running:
        yield running


def keeper(server: NatsServer, keys: Path, trusted: Path, folder: Path, **more: str) -> DaemonProcess:
    given = {"NATS__CREDS": str(keys / "keeper.creds"), "NATS__CA": str(trusted), **more}
    return DaemonProcess(tls_url(server), folder / "daemon", given)


class Denials:
    """What the broker refused."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def hear(self, error: Exception) -> None:
        self.told.append(str(error).lower())

    def of(self, what: str, subject: str) -> bool:
        return any(f'{what} to "{subject.lower()}"' in text for text in self.told)


@asynccontextmanager
async def connected(
    server: NatsServer, keys: Path, name: str, ca: trustme.CA
) -> AsyncIterator[tuple[Client, Denials]]:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    denials = Denials()
    client = await nats.connect(
        tls_url(server), user_credentials=str(keys / f"{name}.creds"), tls=context, error_cb=denials.hear
    )
    try:
        yield client, denials
    finally:
        await client.close()


def started(run: str = "e-1") -> bytes:
    return json.dumps(
        {
            "v": 1,
            "id": run,
            "type": "run.started",
            "at": "2026-11-30T09:00:00Z",
            "goal": "Tag the release",
            "model": {"name": "any", "context_window": 32_000},
        }
    ).encode()


# --- who may say what -----------------------------------------------------------------------------------------


async def test_an_agent_speaks_for_itself_in_its_lane_and_for_nobody_else(
    server: NatsServer, keys: Path, ca: trustme.CA, trusted: Path, tmp_path: Path
) -> None:
    with keeper(server, keys, trusted, tmp_path) as daemon:
        daemon.start()
        await daemon.owning()
        async with connected(server, keys, "agent-main", ca) as (agent, denials):
            packets = await agent.subscribe(f"wk.v1.out.{RUN}.packet")
            stored = await agent.jetstream().publish(f"wk.v1.in.{RUN}.event", started())
            assert stored.stream == "WK_IN"
            answer = await agent.request(
                f"wk.v1.ask.{RUN}.packet", json.dumps({"after": stored.seq}).encode(), timeout=10
            )
            assert json.loads(answer.data)["task"]["goal"] == "Tag the release"
            assert json.loads((await packets.next_msg(timeout=30)).data)["type"] == "resume.packet"
            newest = await agent.request(f"$JS.API.DIRECT.GET.WK_OUT.wk.v1.out.{RUN}.packet", b"", timeout=10)
            assert json.loads(newest.data)["type"] == "resume.packet"
            digest = f"sha256:{'0' * 64}"
            for part in (
                subjects.content_pieces("default", "main", "r", digest),
                subjects.content_description(subjects.content_object("default", "main", "r", digest)),
            ):
                assert (
                    json.loads((await agent.request(part, b"x", timeout=10)).data)["stream"]
                    == "OBJ_WK_CONTENT"
                )
            for forbidden in (
                f"wk.v1.in.{RUN}.authority",
                f"wk.v1.in.{RUN}.record",
                "$JS.API.DIRECT.GET.WK_OUT.wk.v1.out.default.other.r.packet",
                subjects.content_pieces("default", "other", "r", digest),
                "wk.v1.in.default.other.r.event",
                "wk.v1.ask.default.other.r.authorize",
                f"wk.v1.out.{RUN}.packet",
                f"wk.v1.state.{RUN}",
                "wk.v1.state.default.main._lane",
                "$JS.API.STREAM.PURGE.WK_IN",
                "$JS.API.STREAM.INFO.WK_STATE",
            ):
                await agent.publish(forbidden, b"{}")
                await eventually(
                    lambda subject=forbidden: denials.of("publish", subject),  # type: ignore[misc]
                    f"a refusal of {forbidden}",
                )
            for forbidden in ("wk.v1.in.>", "wk.v1.state.>", "wk.v1.out.default.other.>", "wk.v1.ask.>"):
                await agent.subscribe(forbidden)
                await eventually(
                    lambda subject=forbidden: denials.of("subscription", subject),  # type: ignore[misc]
                    f"a refusal of {forbidden}",
                )
        assert await daemon.stopped() == 0
        assert daemon.said("nats error") == []


async def test_an_agent_cannot_have_others_write_for_it(
    server: NatsServer, keys: Path, ca: trustme.CA, trusted: Path, tmp_path: Path
) -> None:
    """The broker's acknowledgement and the daemon's answer go where the asker says: in its own account."""
    with keeper(server, keys, trusted, tmp_path) as daemon:
        daemon.start()
        await daemon.owning()
        async with connected(server, keys, "agent-main", ca) as (agent, _):
            await agent.jetstream().publish(f"wk.v1.in.{RUN}.event", started())
            for target in (
                f"wk.v1.in.{RUN}.authority",
                f"wk.v1.state.{RUN}-x",
                "wk.v1.state.default.main._lane",
            ):
                await agent.publish(f"wk.v1.in.{RUN}.event", b"{}", reply=target)
                await agent.publish(f"wk.v1.ask.{RUN}.packet", b"{}", reply=target)
            # Behind them in the order of everything, so they were handled by now.
            await agent.request(f"wk.v1.ask.{RUN}.status", b"{}", timeout=10)
            await daemon.ready()
            assert await daemon.metric("lanes_owned") == 1
        async with connected(server, keys, "keeper", ca) as (own, _):
            context = own.jetstream()
            for stream, subject in (
                ("WK_IN", f"wk.v1.in.{RUN}.authority"),
                ("WK_STATE", f"wk.v1.state.{RUN}-x"),
            ):
                with pytest.raises(NotFoundError):
                    await context.get_last_msg(stream, subject)
            epoch = json.loads(
                (await context.get_last_msg("WK_STATE", "wk.v1.state.default.main._lane")).data
            )
            assert epoch["type"] == "lane.epoch"
        assert daemon.said("lane lost to another owner") == []
        assert await daemon.stopped() == 0


async def test_in_one_account_the_daemon_still_answers_on_no_subject_of_its_own(tmp_path: Path) -> None:
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        daemon.start()
        await daemon.owning()
        client = await nats.connect(server.url)
        try:
            stored = await client.jetstream().publish(f"wk.v1.in.{RUN}.event", started())
            for verb in ("packet", "status", "nonsense"):
                await client.publish(f"wk.v1.ask.{RUN}.{verb}", b"{}", reply=f"wk.v1.state.{RUN}-x")
            await client.publish("$SRV.PING", b"", reply=f"wk.v1.state.{RUN}-x")
            await client.request(
                f"wk.v1.ask.{RUN}.packet", json.dumps({"after": stored.seq}).encode(), timeout=10
            )
            with pytest.raises(NotFoundError):
                await client.jetstream().get_last_msg("WK_STATE", f"wk.v1.state.{RUN}-x")
        finally:
            await client.close()
        assert await daemon.stopped() == 0


async def test_in_one_account_a_hostile_publisher_holds_a_lane_up_and_gets_nothing_allowed(
    tmp_path: Path,
) -> None:
    """The broker's acknowledgement of its event is stored where it says: on both of the lane's ownership records."""
    records = ("wk.v1.state.default.main._lane", "wk.v1.out.default.main._lane.epoch")
    declared = json.loads(started("e-2")) | {
        "type": "operation.declared",
        "operation_id": "op",
        "kind": "git.tag",
        "idempotency_key": "k",
    }
    with (
        NatsServer() as server,
        DaemonProcess(server.url, tmp_path / "d", {"LEASE__SECONDS": "1.5"}) as daemon,
    ):
        daemon.start()
        await daemon.owning()
        client = await nats.connect(server.url)
        try:
            await client.jetstream().publish(f"wk.v1.in.{RUN}.event", started())
            for attack in (1, 2):
                for record in records:
                    await client.publish(f"wk.v1.in.{RUN}.event", b"{}", reply=record)
                await client.flush()
                await eventually(
                    lambda attack=attack: len(daemon.said("lane lost to another owner")) == attack,  # type: ignore[misc]
                    "the loss of the lane",
                )
                await eventually(
                    lambda attack=attack: len(daemon.said("lane owned")) == attack + 1,  # type: ignore[misc]
                    "the lane's return",
                )
                await daemon.owning()
            assert [entry["epoch"] for entry in daemon.said("lane owned")] == [1, 2, 3]
            stored = await client.jetstream().publish(f"wk.v1.in.{RUN}.event", json.dumps(declared).encode())
            asked = {"operation_id": "op", "request_id": "q", "after": stored.seq}
            subject = f"wk.v1.ask.{RUN}.authorize"
            answer = await client.request(subject, json.dumps(asked).encode(), timeout=10)
            assert json.loads(answer.data)["code"] == "ok"
        finally:
            await client.close()
        assert await daemon.stopped() == 0


async def test_an_authority_decides_and_the_agent_does_not(
    server: NatsServer, keys: Path, ca: trustme.CA, trusted: Path, tmp_path: Path
) -> None:
    released = {"v": 1, "id": "p-1", "type": "policy.released", "at": "2026-11-30T09:00:00Z", "version": "7"}
    with keeper(server, keys, trusted, tmp_path) as daemon:
        daemon.start()
        await daemon.owning()
        async with (
            connected(server, keys, "agent-main", ca) as (agent, _),
            connected(server, keys, "authority", ca) as (authority, denials),
        ):
            await agent.jetstream().publish(f"wk.v1.in.{RUN}.event", started())
            stored = await authority.jetstream().publish(
                f"wk.v1.in.{RUN}.authority", json.dumps(released).encode()
            )
            packet = await agent.request(
                f"wk.v1.ask.{RUN}.packet", json.dumps({"after": stored.seq}).encode(), timeout=10
            )
            assert json.loads(packet.data)["policy"]["released"] == "7"
            for forbidden in (
                f"wk.v1.in.{RUN}.event",
                f"wk.v1.in.{RUN}.record",
                f"wk.v1.ask.{RUN}.authorize",
            ):
                await authority.publish(forbidden, b"{}")
                await eventually(
                    lambda subject=forbidden: denials.of("publish", subject),  # type: ignore[misc]
                    f"a refusal of {forbidden}",
                )
        assert await daemon.stopped() == 0


async def test_the_daemon_may_do_its_whole_work_and_no_more(
    server: NatsServer, keys: Path, ca: trustme.CA, trusted: Path
) -> None:
    states = States()
    settings = LinkSettings(url=tls_url(server), creds=keys / "keeper.creds", ca=trusted, name="test")
    link = Link(settings, states)
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        await ensure_streams(link)
        assert await ensure_contents(link, max_bytes=1_000_000)
        blobs = Blobs(link)
        # Enough for the broker to ask whether the reader keeps up.
        await blobs.put("a", bytes(4_000_000))
        assert await blobs.get("a") == bytes(4_000_000)
        await blobs.delete("a")
        for stream in credentials["STREAMS"]:
            assert await subjects_held(link, stream, ">") == {}
            assert await purge(link, stream, "wk.v1.nothing") == 0
        tasks.cancel_scope.cancel()
    async with connected(server, keys, "keeper", ca) as (own, denials):
        for forbidden in (
            f"wk.v1.in.{RUN}.event",
            f"wk.v1.in.{RUN}.authority",
            "wk.v1.in.another.main.r.record",
            "wk.v1.state.another.main.r",
            "$JS.API.STREAM.CREATE.ORDERS",
            "$JS.API.STREAM.DELETE.WK_IN",
            "$JS.API.STREAM.UPDATE.WK_IN",
        ):
            await own.publish(forbidden, b"{}")
            await eventually(
                lambda subject=forbidden: denials.of("publish", subject),  # type: ignore[misc]
                f"a refusal of {forbidden}",
            )


async def test_a_summariser_answers_and_says_nothing_else(
    server: NatsServer, keys: Path, ca: trustme.CA
) -> None:
    asked = "wk.v1.summarize.default.main.r"
    async with (
        connected(server, keys, "summarizer", ca) as (summarizer, denials),
        connected(server, keys, "keeper", ca) as (own, _),
    ):

        async def answer(message: Msg) -> None:
            await message.respond(b"{}")

        await summarizer.subscribe(asked, cb=answer)
        await summarizer.flush()
        with anyio.fail_after(30):
            while True:
                # Interest crosses from one account to the other when the server gets to it.
                with contextlib.suppress(nats.errors.NoRespondersError):
                    assert (await own.request(asked, b"{}", timeout=10)).data == b"{}"
                    break
                await anyio.sleep(0.01)
        for forbidden in (f"wk.v1.in.{RUN}.event", f"wk.v1.state.{RUN}", "$JS.API.INFO", "_INBOX.any"):
            await summarizer.publish(forbidden, b"{}")
            await eventually(
                lambda subject=forbidden: denials.of("publish", subject),  # type: ignore[misc]
                f"a refusal of {forbidden}",
            )


def test_the_permissions_speak_of_every_stream_and_bucket_there_is() -> None:
    streams = {value for name, value in vars(subjects).items() if name.startswith("STREAM_")}
    buckets = {value for name, value in vars(subjects).items() if name.startswith("BUCKET_")}
    assert set(credentials["STREAMS"]) == streams
    assert set(credentials["BUCKETS"]) == buckets


def test_the_script_shows_who_may_what_and_overwrites_nothing(tmp_path: Path, keys: Path) -> None:
    script = [sys.executable, str(NATS / "credentials.py")]
    shown = subprocess.run([*script, "--show", "--lane", "a"], capture_output=True, text=True, check=True)
    assert set(json.loads(shown.stdout)) == {"keeper", "summarizer", "authority", "agent-a"}
    before = (keys / "keeper.creds").read_text()
    again = subprocess.run([*script, str(keys)], capture_output=True, text=True)
    assert again.returncode != 0
    assert (keys / "keeper.creds").read_text() == before
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}


# --- the sample agent -----------------------------------------------------------------------------------------


async def test_the_sample_agent_lives_as_a_job_beside_its_daemon(
    server: NatsServer, keys: Path, trusted: Path, tmp_path: Path
) -> None:
    """A Job's life: the daemon is started, the agent runs to its end, the daemon is stopped, and all said yes."""
    with keeper(server, keys, trusted, tmp_path) as daemon:
        daemon.start()
        await daemon.owning()
        first, again = await sample(server, keys, trusted), await sample(server, keys, trusted)
        assert first == ["may I tag? ok", "where the run stands: pause"]
        assert again[0] == "may I tag? run_finished"
        assert await daemon.stopped() == 0


async def sample(server: NatsServer, keys: Path, trusted: Path) -> list[str]:
    """What one start of it prints."""
    given = {
        "PATH": os.environ["PATH"],
        "LANE": "main",
        "RUN": "sample-job",
        "NATS_URL": tls_url(server),
        "NATS_CREDS": str(keys / "agent-main.creds"),
        "SSL_CERT_FILE": str(trusted),
    }
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, str(SAMPLE_AGENT)], env=given, capture_output=True, text=True, timeout=90
        )
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- TLS ------------------------------------------------------------------------------------------------------


async def test_a_certificate_of_an_unknown_authority_ends_the_start_with_three(
    server: NatsServer, keys: Path, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.crt"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    with keeper(server, keys, stranger, tmp_path) as daemon:
        daemon.start()
        assert await daemon.ended() == 3
        assert "certificate not trusted" in daemon.log


async def test_a_broker_that_offers_no_tls_is_told_nothing(tmp_path: Path, trusted: Path, keys: Path) -> None:
    """The greeting is in the clear, so anybody in between may say that TLS is not needed."""
    heard: list[bytes] = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b'INFO {"server_id":"x","version":"2.11.0","max_payload":1048576,"auth_required":true,"nonce":"n"}\r\n'
        )
        heard.append(await reader.read())
        writer.close()

    pretender = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = pretender.sockets[0].getsockname()[1]
    async with pretender:
        for number, (scheme, given) in enumerate((("tls", {}), ("nats", {"NATS__CA": str(trusted)}))):
            url = f"{scheme}://keeper:very-secret@127.0.0.1:{port}"
            with DaemonProcess(url, tmp_path / f"daemon-{number}", given) as daemon:
                daemon.start()
                assert await daemon.ended() == 3
                assert "offers no TLS" in daemon.log
                assert "very-secret" not in daemon.log
    assert heard == [b"", b""]


async def test_a_broker_that_asks_for_certificates_gets_ours(
    ca: trustme.CA, keys: Path, trusted: Path, tmp_path: Path
) -> None:
    leaf = ca.issue_cert("keeper")
    both, certificate, key = (tmp_path / name for name in ("both.pem", "tls.crt", "tls.key"))
    leaf.private_key_and_cert_chain_pem.write_to_path(str(both))
    leaf.private_key_pem.write_to_path(str(key))
    certificate.write_bytes(leaf.cert_chain_pems[0].bytes())
    with NatsServer(config=secured(ca, tmp_path, keys, clients_too=True)) as server:
        apart = {"NATS__CERT": str(certificate), "NATS__KEY": str(key)}
        for number, given in enumerate((apart, {"NATS__CERT": str(both)})):
            with keeper(server, keys, trusted, tmp_path / str(number), **given) as daemon:
                daemon.start()
                await daemon.owning()
                assert await daemon.stopped() == 0
        with keeper(server, keys, trusted, tmp_path / "wrong", NATS__CERT=str(trusted)) as daemon:
            daemon.start()
            assert await daemon.ended() == 3
            assert "ca.crt" in daemon.log


async def test_certificates_that_are_rotated_are_used_at_the_next_connection(
    server: NatsServer, keys: Path, trusted: Path, tmp_path: Path
) -> None:
    with keeper(server, keys, trusted, tmp_path) as daemon:
        daemon.start()
        await daemon.owning()
        other = trustme.CA()
        other.cert_pem.write_to_path(str(trusted))
        server.write_config(secured(other, tmp_path, keys))
        server.restart()
        await eventually(
            lambda: len(daemon.said("nats connected")) > 1, "a connection under the new authority"
        )
        await daemon.owning()
        assert await daemon.stopped() == 0


# --- the chart's values ---------------------------------------------------------------------------------------


async def test_what_the_values_merge_a_server_takes(keys: Path, tmp_path: Path) -> None:
    merged: dict[str, Any] = {}
    for path in (NATS / "values.yaml", keys / "values-auth.yaml"):
        merged |= yaml.safe_load(path.read_text())["config"]["merge"]
    # JSON is a form of the server's configuration, but its outermost braces.
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in merged.items())
    with NatsServer(config=text) as server:
        daemon = DaemonProcess(server.url, tmp_path / "daemon", {"NATS__CREDS": str(keys / "keeper.creds")})
        with daemon:
            daemon.start()
            await daemon.owning()
            assert await daemon.stopped() == 0


def test_the_values_are_of_a_cluster_the_daemon_accepts() -> None:
    values = yaml.safe_load((NATS / "values.yaml").read_text())
    assert values["config"]["cluster"] == {"enabled": True, "replicas": 3}
    assert values["config"]["jetstream"]["enabled"] is True
    major, minor = map(int, values["container"]["image"]["tag"].partition("-")[0].split(".")[:2])
    assert (major, minor) >= (2, 11)
    assert values["config"]["merge"]["max_payload"] > 1_048_576

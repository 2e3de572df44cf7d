"""One peer's durable store, told what to do line by line. Runs under the interpreter that has the peer.

Imports nothing of this project. Each step appends one message of about 1 KiB the way the peer's own framework
does: a LangGraph step puts a checkpoint with the whole list (``default``), or the step's write and a checkpoint
without the list (``delta``: what its delta channel writes, its lower bound); a session adds one item; ADK
appends one event.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import random
import sqlite3
import sys
import time
from typing import Any

TEXT = 900
PROSE = "agent context window budget checkpoint tool result search file read write plan step error retry"


def texts() -> list[str]:
    dice, words = random.Random(2), PROSE.split()
    return [" ".join(dice.choice(words) for _ in range(200))[:TEXT] for _ in range(64)]


class LangGraph:
    """AsyncSqliteSaver, one thread of one graph."""

    distribution = "langgraph-checkpoint-sqlite"

    def __init__(self, path: str, delta: bool) -> None:
        self.path, self.delta, self.step, self.history = path, delta, 0, []
        self.texts = texts()

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        from langchain_core.messages import AIMessage
        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        self.message, self.empty = AIMessage, empty_checkpoint
        self.saver = await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(self.path))
        await self.saver.setup()
        self.config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}

    async def fill(self, through: int) -> None:
        """Of the steps between only the last is stored: each holds all before it anyway."""
        while self.step < through:
            if self.delta or self.step == through - 1:
                await self.one()
            else:
                self.next()

    def next(self) -> Any:
        self.step += 1
        made = self.message(content=self.texts[self.step % 64], id=f"m{self.step}")
        self.history.append(made)
        return made

    async def one(self) -> float:
        made = self.next()
        name = f"{self.step:032d}"
        checkpoint = dict(self.empty(), id=name, channel_versions={"messages": name})
        checkpoint["channel_values"] = {} if self.delta else {"messages": list(self.history)}
        metadata = {"source": "loop", "step": self.step, "parents": {}}
        began = time.perf_counter()
        if self.delta:
            before = {
                "configurable": {**self.config["configurable"], "checkpoint_id": f"{self.step - 1:032d}"}
            }
            await self.saver.aput_writes(before, [("messages", [made])], "task")
        self.config = await self.saver.aput(self.config, checkpoint, metadata, {"messages": name})
        return time.perf_counter() - began

    async def get(self) -> float:
        began = time.perf_counter()
        found = await self.saver.aget_tuple({"configurable": {"thread_id": "t", "checkpoint_ns": ""}})
        took = time.perf_counter() - began
        assert found is not None
        return took


class Session:
    """A session of the OpenAI Agents SDK."""

    distribution = "openai-agents"

    def __init__(self, path: str, kind: str) -> None:
        self.path, self.kind, self.step, self.texts = path, kind, 0, texts()

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        if self.kind == "SQLiteSession":
            from agents.memory import SQLiteSession

            self.session: Any = SQLiteSession("s", self.path)
        elif self.kind == "AsyncSQLiteSession":
            from agents.extensions.memory import AsyncSQLiteSession

            self.session = AsyncSQLiteSession("s", self.path)
        else:
            from agents.extensions.memory import AdvancedSQLiteSession

            self.session = AdvancedSQLiteSession(session_id="s", db_path=self.path, create_tables=True)

    def item(self) -> dict[str, str]:
        self.step += 1
        return {"role": "user" if self.step % 2 else "assistant", "content": self.texts[self.step % 64]}

    async def fill(self, through: int) -> None:
        while self.step < through:
            await self.session.add_items([self.item() for _ in range(min(250, through - self.step))])

    async def one(self) -> float:
        items = [self.item()]
        began = time.perf_counter()
        await self.session.add_items(items)
        return time.perf_counter() - began

    async def get(self) -> float:
        began = time.perf_counter()
        await self.session.get_items()
        return time.perf_counter() - began


class Adk:
    """A session service of the Agent Development Kit."""

    distribution = "google-adk"

    def __init__(self, path: str, kind: str) -> None:
        self.path, self.kind, self.step, self.texts = path, kind, 0, texts()

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        from google.adk.events import Event
        from google.genai import types

        self.event, self.types = Event, types
        if self.kind == "SqliteSessionService":
            from google.adk.sessions.sqlite_session_service import SqliteSessionService

            self.service: Any = SqliteSessionService(self.path)
        else:
            from google.adk.sessions import DatabaseSessionService

            self.service = DatabaseSessionService(f"sqlite+aiosqlite:///{self.path}")
        self.session = await self.service.create_session(app_name="a", user_id="u")

    async def fill(self, through: int) -> None:
        while self.step < through:
            await self.one()

    async def one(self) -> float:
        self.step += 1
        content = self.types.Content(role="model", parts=[self.types.Part(text=self.texts[self.step % 64])])
        event = self.event(author="agent", invocation_id="i", content=content)
        began = time.perf_counter()
        await self.service.append_event(self.session, event)
        return time.perf_counter() - began

    async def get(self) -> float:
        began = time.perf_counter()
        await self.service.get_session(app_name="a", user_id="u", session_id=self.session.id)
        return time.perf_counter() - began


def peer(kind: str, folder: str) -> Any:
    path = os.path.join(folder, f"{kind}.db")
    if kind.startswith("langgraph"):
        return LangGraph(path, kind.endswith("delta"))
    return (Session if "Session" in kind and "Service" not in kind else Adk)(path, kind)


async def main() -> None:
    loop = asyncio.get_running_loop()
    made = peer(sys.argv[1], sys.argv[2])
    async with contextlib.AsyncExitStack() as stack:
        try:
            await made.open(stack)
            under = f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}"
            named = f"{made.distribution} {importlib.metadata.version(made.distribution)}"
            print(json.dumps({"version": named, "under": under}), flush=True)
        except ImportError as error:
            print(json.dumps({"missing": f"{made.distribution}: {error}"}), flush=True)
            return
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            match asked["do"]:
                case "fill":
                    await made.fill(asked["steps"])
                    answer: Any = {}
                case "steps":
                    answer = {"seconds": [await made.one() for _ in range(asked["count"])]}
                case "get":
                    answer = {"seconds": [await made.get() for _ in range(asked["count"])]}
                case _:
                    answer = {"error": f"unknown {asked['do']}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

"""A process that commits for ever and says on stdout what was acknowledged; made to be killed.

Arguments: data directory, first version. Each line: the last version of the unit just acknowledged.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from storage import GENESIS, Cursor, Store
from support.storage_rows import LANE, TENANT, Messages, outgoing, run_row, unit


async def main() -> None:
    run = Messages()
    async with await Store.open(Path(sys.argv[1]), seal_keys=64) as store, anyio.create_task_group() as group:
        await group.start(store.run_writer)
        for stored in await store.load_family(TENANT, LANE, "r1"):
            run.version, run.position, run.chain = stored.version, stored.position, stored.chain or GENESIS
        print("open", flush=True)
        while True:
            entries = run.some(3)
            await store.commit(
                unit(
                    journal=entries,
                    runs=(run_row(),),
                    outbox=(outgoing(run.version),),
                    cursor=Cursor(run.version, "then"),
                )
            )
            print(run.version, flush=True)


anyio.run(main)

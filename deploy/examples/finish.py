"""Ends a run whose agent is gone, on the authority channel: its packets then say `pause`, nothing more is allowed.

    python deploy/examples/finish.py URL RUN [--lane LANE] [--creds authority.creds]

Afterwards the run can be forgotten. What it left pending stays in its ledger, for whoever looks.
"""

from __future__ import annotations

import argparse
import asyncio

from protocol.client import connect


async def main(given: argparse.Namespace) -> None:
    where = {"tenant": given.tenant, "lane": given.lane, "creds": given.creds}
    async with connect(given.url, run=given.run, channel="authority", **where) as run:
        await run.run_finished(outcome=given.outcome, detail="ended by an operator: its agent is gone")
    print("finished:", given.run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("run")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--lane", default="main")
    parser.add_argument("--creds", help="a credentials file of the authority")
    parser.add_argument("--outcome", choices=("succeeded", "failed", "cancelled"), default="cancelled")
    asyncio.run(main(parser.parse_args()))

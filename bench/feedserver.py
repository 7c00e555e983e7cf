"""A process that serves the live page's feed and nothing else: what viewers alone cost.

python -m bench.feedserver PORT FRAME_BYTES
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop
from aiohttp import web

from extproc.observe.livepage import LivePage


async def serve(port: int, frame_bytes: int) -> None:
    """Serve frames of one size until the process is ended."""
    frame = b'{"filling":"%b"}' % (b"x" * frame_bytes)
    app = web.Application()
    LivePage(lambda: frame, time.monotonic).add_to(app)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))

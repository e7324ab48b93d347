"""A scripted vLLM as a process of its own, on a Unix socket: `python -m tests.server.sampler.scripted_replica SOCKET NOTES`.

Each line of NOTES is a request that it received. A stream's second piece, and a whole answer, wait for a file `go` beside
NOTES. With `fails` it ends at once."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from offbook.testing import ScriptedCompletion, ScriptedSampler

PAUSE = 0.02


@dataclass
class NotingReplica(ScriptedSampler):
    """Writes what it receives to a file."""

    notes: Path = Path()

    async def _control(self, path: str, body: Any, query: str, send: Any) -> None:
        self.note(f"{path} {body.get('lora_name', '')}".strip())
        await super()._control(path, body, query, send)

    async def _complete(self, body: Any, receive: Any, send: Any) -> None:
        self.note(f"call {body['user']} of {body['model']}{' stream' if body.get('stream') else ''}")
        gate = asyncio.Event()
        self.completions.append(ScriptedCompletion(gates={int(bool(body.get("stream"))): gate}))
        waiting = asyncio.create_task(self._open(gate))
        await super()._complete(body, receive, send)
        await waiting

    async def _open(self, gate: asyncio.Event) -> None:
        while not self.notes.with_name("go").exists():
            await asyncio.sleep(PAUSE)
        gate.set()

    def note(self, text: str) -> None:
        with self.notes.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    if "fails" in sys.argv:
        print("the card is on fire")
        sys.exit(1)
    replica: Any = NotingReplica(notes=Path(sys.argv[2]))
    uvicorn.run(replica, uds=sys.argv[1], log_config=None, access_log=False, lifespan="off")

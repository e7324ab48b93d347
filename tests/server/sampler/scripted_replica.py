"""A scripted vLLM as a process of its own, on a Unix socket: `python -m tests.server.sampler.scripted_replica SOCKET NOTES`,
or, as vLLM, on `--host H --port P` with the key of VLLM_API_KEY for all below /v1: `... --notes NOTES`.

Each line of NOTES is a request that it received. A stream's second piece, and a whole answer, wait for a file `go` beside
NOTES. With `fails` it ends at once."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from offbook.engine.inference.vllm import command
from offbook.testing.asgi import send_json
from tests.fakes.scripted_sampler import ScriptedCompletion, ScriptedSampler

PAUSE = 0.02


@dataclass
class NotingReplica(ScriptedSampler):
    """Writes what it receives to a file."""

    notes: Path = Path()

    async def _control(self, path: str, body: Any, query: str, send: Any) -> None:
        if "lora_path" in body and not str(body["lora_path"]).startswith("/checkpoints"):
            self.note(f"lora {sorted(file.name for file in Path(body['lora_path']).iterdir())}")
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


def with_key(app: Any, key: str) -> Any:
    """vLLM's AuthenticationMiddleware (entrypoints/openai/server_utils.py): 401 below /v1 for another key."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/v1") and (b"authorization", f"Bearer {key}".encode()) not in scope["headers"]:
            await send_json(send, 401, {"error": "Unauthorized"})
        else:
            await app(scope, receive, send)

    return guarded


def listening(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("--host", "--notes", "--port"):
        parser.add_argument(name)
    parser.add_argument("--parent-pid", type=int)
    options, _ = parser.parse_known_args(words)
    if options.parent_pid is not None:  # below vLLM's real starter, which ends it
        command.API_SERVER = "tests.server.sampler.scripted_replica"
        ours = [f"--{name}={getattr(options, name)}" for name in ("host", "notes")]
        sys.exit(command.run([*ours, "--port", options.port], {}, options.parent_pid))
    replica: Any = NotingReplica(notes=Path(options.notes))
    app = with_key(replica, os.environ["VLLM_API_KEY"])
    print(f"scripted vLLM {os.getpid()} listens")
    uvicorn.run(app, host=options.host, port=int(options.port), log_config=None, access_log=False, lifespan="off")


if __name__ == "__main__":
    if "fails" in sys.argv:
        print("the card is on fire")
        sys.exit(1)
    if "--port" in sys.argv:
        listening(sys.argv)
    else:
        replica: Any = NotingReplica(notes=Path(sys.argv[2]))
        uvicorn.run(replica, uds=sys.argv[1], log_config=None, access_log=False, lifespan="off")

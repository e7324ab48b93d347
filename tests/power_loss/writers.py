"""What the server and its learner write, done in a process whose changes are recorded.

    python -m tests.power_loss.writers ROOT files|records [durable]

After each change that was promised to somebody, its name is written to `ROOT/.acks`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from offbook.base.config import LoraOptions
from offbook.base.types import (
    Call,
    CallOutput,
    CallStatus,
    Sampling,
    TrainResult,
)

from .disk import ACKS

CHANGES = 3
CALLS = 24
LONG = 1_200_000
"""Letters of every sixth prompt: SQLite takes its log in several times."""


def call(number: int) -> Call:
    """The call that is recorded as the `number`th."""
    return Call(
        id=f"call-{number}",
        trajectory_id=f"trajectory-{number}",
        model="agent",
        step=0,
        status=CallStatus.COMPLETE,
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0),
        messages=({"role": "user", "content": "x" * (LONG if number % 6 == 5 else 50)},),
        tools=None,
        prompt_ids=tuple(range(50)),
        outputs=(
            CallOutput(
                index=0,
                message={"role": "assistant", "content": "x"},
                token_ids=(number, 2),
                logprobs=(-0.5, -0.25),
                finish_reason="stop",
                status=CallStatus.COMPLETE,
            ),
        ),
        started_at=float(number),
        ended_at=number + 0.5,
    )


def write_files(root: Path, acknowledge: Callable[[str], None]) -> None:
    """A new model, some steps and states of it, and a fork."""
    import torch
    from safetensors.torch import save

    from offbook.engine import checkpoint_files
    from offbook.engine.checkpoint_files import CheckpointNote
    from offbook.engine.learner.checkpoints import Draft, OptimizerState, rng_states
    from offbook.server.models.checkpoints import ModelFacts, copy_model, write_facts, write_text

    lora = LoraOptions()
    folder = root / "project" / "models" / "agent"
    write_facts(folder, ModelFacts(name="agent", project="project", base_model="tiny", lora=lora))
    acknowledge("facts")
    for number in range(1, CHANGES + 1):
        write_text(folder / "state.json", json.dumps({"value": {"count": number, "padding": "x" * 3000}}))
        acknowledge(f"state-{number}")
        with Draft(folder / "checkpoints", number) as draft:
            (draft.path / checkpoint_files.ADAPTER_CONFIG).write_text("{}")
            (draft.path / checkpoint_files.ADAPTER).write_bytes(save({"lora": torch.full((40, 40), float(number))}))
            draft.write_optimizer(OptimizerState({"w|m": torch.zeros(8)}, number))
            draft.write_rng(rng_states())
            result = TrainResult(
                applied=True, step=number, request_id=f"r-{number}", model="agent", metrics={}, checkpoint=None
            )
            draft.commit(
                CheckpointNote(
                    step=number,
                    request_id=f"r-{number}",
                    model="agent",
                    base_model="tiny",
                    lora=lora,
                    config={},
                    metrics={},
                    result=result,
                    created_at=float(number),
                )
            )
        acknowledge(f"step-{number}")
    start = checkpoint_files.read(checkpoint_files.path_of(folder / "checkpoints", CHANGES))
    copy_model(
        folder.with_name("fork"), ModelFacts(name="fork", project="project", base_model="tiny", lora=lora), start
    )
    acknowledge("fork")


async def write_records(root: Path, acknowledge: Callable[[str], None], *, durable: bool) -> None:
    """Calls one after the other; the records are closed and opened again in between, as a server that is restarted does."""
    from offbook.server.records.store import Store

    for half in range(2):
        store = await Store.open(root / "records.db", durable=durable)
        acknowledge("opened")
        for number in range(half * CALLS // 2, (half + 1) * CALLS // 2):
            await store.add_call(call(number))
            acknowledge(f"call-{number}")
        await store.close()


def main() -> None:
    root = Path(sys.argv[1])
    acks = os.open(root / ACKS, os.O_WRONLY | os.O_APPEND)

    def acknowledge(what: str) -> None:
        os.write(acks, f"{what}\n".encode())

    if sys.argv[2] == "files":
        write_files(root, acknowledge)
    else:
        asyncio.run(write_records(root, acknowledge, durable="durable" in sys.argv))


if __name__ == "__main__":
    main()

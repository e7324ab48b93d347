"""A supervised training of the campaign: `train_sft`, each of whose updates is acknowledged in a journal when all are done.

    python -m tests.campaign.supervised URL MODEL BASE JOURNAL

The same command goes on where a killed one was.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from offbook import RemoteBackend, TrainableModel

from .journal import Journal

CONVERSATIONS = 4
EPOCHS = 2
UPDATES = CONVERSATIONS * EPOCHS


async def main() -> None:
    url, name, base, journal = sys.argv[1:]
    said = [(f"What is {number} and 1?", str(number + 1)) for number in range(CONVERSATIONS)]
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]}
        for asked, told in said
    ]
    model = TrainableModel(name, base_model=base, backend=RemoteBackend(url))
    result = await model.train_sft(rows, epochs=EPOCHS, batch_size=1, pbar_desc=None)
    kept = Journal(Path(journal))
    for number, update in enumerate(result.updates):
        kept.add("trained", id=f"{result.request_id}-{update.epoch}-{number}", step=update.step, applied=True)


if __name__ == "__main__":
    asyncio.run(main())

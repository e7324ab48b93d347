"""`offbook.engine.learner`, one rank of which breaks while it loads the base, or in the first row that it trains.

BREAK: `RANK PLACE HOW`. PLACE: `load`; `forward`, behind the first layer, while the others gather the second; `backward`, before the
first layer's gradient is complete. HOW: `memory` (torch.OutOfMemoryError) or `kill` (SIGKILL).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from offbook.engine.learner import team
from offbook.engine.learner.__main__ import main, parse
from offbook.engine.learner.model import sharding
from offbook.engine.learner.update.row_pass import RowPass

PLAIN = RowPass._backward_row
_, PLACE, HOW = os.environ["BREAK"].split()


def broken(*_: Any) -> None:
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise torch.OutOfMemoryError("CUDA out of memory")


def backward_row(self: Any, *arguments: Any) -> float:
    policy = self._policy
    if PLACE == "forward":
        hook = policy.model.get_base_model().model.layers[0].register_forward_hook(broken)
    else:
        hook = next(iter(policy.trainable_parameters().values())).register_hook(broken)
    try:
        return PLAIN(self, *arguments)
    finally:
        hook.remove()


if __name__ == "__main__":
    if os.environ["BREAK"].startswith(f"{parse().rank} "):
        if PLACE == "load":
            sharding.shard = broken
        RowPass._backward_row = backward_row  # type: ignore[method-assign]
    team.LEARNER_MODULE = "tests.engine.learner.breaking_learner"
    sys.exit(main())

"""Makes and stores the token file of a step. `engine/token_file.py` has its format; the dashboard reads it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import token_file
from ..protocol import TrainCommand, TrainJob
from ..token_file import CLIPPED, FORMAT, TRAINED, Fork, TokenFile, TokenHead, TrainedCall
from ..token_tree import Segments, TokenTree, build_tree
from .targets.batch import TrainBatch
from .update.step import StepTotals


def make_token_file(
    command: TrainCommand, job: TrainJob, batch: TrainBatch, totals: StepTotals, forks: Sequence[Fork]
) -> TokenFile:
    """The token file of a computed step. `head.applied` is False if the step had no update."""
    tree = build_tree(batch.samples)
    runs = tree.segments()
    head = TokenHead(
        format=FORMAT,
        model=command.model,
        step=command.step + 1,
        applied=totals.updates > 0,
        request_id=command.request_id,
        loss=job.config.loss,
        updates=totals.updates,
        created_at=time.time(),
        calls=_calls(batch, tree, runs),
        forks=tuple(forks),
    )
    kept, clipped = _numbers(totals.old.kept), _numbers(totals.last.clipped)
    return TokenFile(
        head,
        token_ids=batch.settings.token_ids.astype(np.int32),
        recorded=np.concatenate([sample.logprobs for sample in batch.samples]).astype(np.float32),
        logprobs=_numbers(totals.old.logprobs).astype(np.float32),
        entropy=_numbers(totals.old.entropy).astype(np.float16),
        coefficients=_numbers(totals.last.coefficients).astype(np.float32),
        flags=(TRAINED * kept + CLIPPED * clipped).astype(np.uint8),
        segment_length=(runs.end - runs.start).astype(np.int32),
        segment_parent=runs.parent.astype(np.int32),
        last_logprobs=_numbers(totals.last.logprobs).astype(np.float32) if totals.updates > 1 else None,
    )


def _calls(batch: TrainBatch, tree: TokenTree, runs: Segments) -> tuple[TrainedCall, ...]:
    last = [tree.target_node[sample.offset + len(sample.completion_ids) - 1] for sample in batch.samples]
    leaves = np.searchsorted(runs.start, last, "right") - 1
    return tuple(
        TrainedCall(
            trajectory=batch.trajectories[int(batch.trajectory[sample.offset])],
            call_id=sample.call_id,
            index=sample.index,
            step=sample.step,
            prompt=len(sample.prompt_ids),
            offset=sample.offset,
            tokens=len(sample.completion_ids),
            advantage=float(batch.advantages[sample.offset]),
            weight=sample.weight,
            constrained=sample.constrained,
            leaf=int(leaf),
        )
        for sample, leaf in zip(batch.samples, leaves, strict=True)
    )


def store_token_file(command: TrainCommand, tokens: TokenFile, warn: Callable[[str], None]) -> None:
    """Write the token file and delete old ones. An OSError is only a warning, because the step is valid without it."""
    folder = token_file.folder_of(command.checkpoints)
    try:
        token_file.write(folder, tokens)
        token_file.sweep(folder, command.keep_tokens)
    except OSError as error:
        what = "no space is left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        warn(
            f"the token file of step {tokens.head.step} was not kept in {folder}: {what}. Training goes on; the pages show "
            "this step's rollouts without the learner's numbers. Free space, or set keep_tokens=0"
        )


def _numbers(tensor: Tensor) -> NDArray[Any]:
    return tensor.numpy()

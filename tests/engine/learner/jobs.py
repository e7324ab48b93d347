"""Train jobs for tests: a tiny random base with the bundled tokenizer, and trajectories that branch and share prompts."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from offbook import tiny
from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.types import Sampling
from offbook.engine.protocol import JobTrajectory, Sample, TrainCommand, TrainJob, write_job

VOCABULARY = 1536
LORA = LoraOptions(r=2, alpha=4)


def write_toy_base(folder: Path) -> Path:
    """A two-layer Qwen2 of width 32 with random weights, beside the bundled policy's tokenizer."""
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny.path() / name, folder / name)
    return folder


def sample(
    name: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float] | None = None,
    **changes: object,
) -> Sample:
    """One call at temperature 1, by default without recorded logprobs."""
    made = Sample(
        call_id=name,
        index=0,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.array(logprobs if logprobs is not None else [np.nan] * len(completion), np.float32),
        sampling=Sampling(),
        step=0,
    )
    return replace(made, **changes)


def random_groups(
    seed: int, *, groups: int = 2, rollouts: int = 3, turns: int = 2, vocabulary: int = VOCABULARY
) -> tuple[tuple[JobTrajectory, ...], ...]:
    """Groups whose rollouts share a prompt, have one to `turns` turns, sometimes share or retry completions, and differ
    in temperature from turn to turn. Recorded logprobs are near -2, some are missing, some calls are constrained."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(low, high))]

    made: list[tuple[JobTrajectory, ...]] = []
    for g in range(groups):
        opening, shared = tokens(2, 7), tokens(2, 5)
        members: list[JobTrajectory] = []
        for i in range(rollouts):
            prompt, samples = list(opening), []
            for turn in range(draw.randint(1, turns)):
                completion = shared if draw.random() < 0.25 else tokens(1, 6)
                logprobs = [draw.gauss(-2, 0.5) if draw.random() < 0.8 else float("nan") for _ in completion]
                constrained = "tool_choice" if draw.random() < 0.15 else None
                temperature = draw.choice([0.7, 1.0, 1.5])
                samples.append(
                    sample(
                        f"call-{g}-{i}-{turn}",
                        prompt,
                        completion,
                        logprobs,
                        constrained=constrained,
                        sampling=Sampling(temperature=temperature),
                    )
                )
                if draw.random() < 0.8:
                    prompt = prompt + completion
                prompt = prompt + tokens(1, 4)
            members.append(JobTrajectory(f"traj-{g}-{i}", float(i % 2) + 0.25 * draw.random(), tuple(samples)))
        made.append(tuple(members))
    return tuple(made)


def command(
    root: Path,
    groups: Sequence[Sequence[JobTrajectory]],
    step: int,
    config: TrainConfig | None = None,
    *,
    request_id: str | None = None,
    model: str = "agent",
) -> TrainCommand:
    """Write a job below `root` and return the command that applies it to `root`/`model`/checkpoints."""
    request = request_id or f"request-{step}"
    job = TrainJob(request, model, tuple(map(tuple, groups)), config or TrainConfig(learning_rate=1e-2))
    folder = root / "jobs" / request
    shutil.rmtree(folder, ignore_errors=True)
    write_job(folder, job)
    return TrainCommand(
        request_id=request, model=model, job=folder, checkpoints=root / model / "checkpoints", step=step, lora=LORA
    )

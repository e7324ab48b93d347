"""Write trl_losses.json: loss values and gradients that TRL's own GRPO loss computes, as a reference for ours.

Run it in an environment of its own (TRL's CPU path ended with 1.4; torch 2.13, transformers 5.17, peft 0.21 beside it):

    pip install trl==1.4.0 accelerate datasets && python tests/engine/learner/make_trl_losses.py

Each case runs `GRPOTrainer._compute_loss` in float64 on random logprobs of padded rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from trl import __version__
from trl.trainer.grpo_trainer import GRPOTrainer

ROWS, LENGTH = 5, 7
CASES = {  # ours: (TRL's loss_type, level, epsilon_low, epsilon_high; TRL's epsilon_high of cispo is the whole ratio)
    "grpo": ("grpo", "token", 0.2, 0.2),
    "dapo": ("dapo", "token", 0.2, 0.28),
    "dr_grpo": ("dr_grpo", "token", 0.2, 0.2),
    "gspo": ("grpo", "sequence", 0.05, 0.08),
    "cispo": ("cispo", "token", 0.2, 1.2),
}
MAX_TOKENS = 11


def case(name: str, beta: float, corrected: bool, seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    loss_type, level, low, high = CASES[name]
    lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    old = -normal(1, ROWS, LENGTH).abs()
    current = (old + normal(0.3, ROWS, LENGTH)).requires_grad_()
    reference = old + normal(0.3, ROWS, LENGTH)
    sampler = old + normal(0.3, ROWS, LENGTH)
    advantages = normal(1, ROWS)
    importance = torch.exp(old - sampler).clamp(max=1.2)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (current, torch.zeros_like(current)),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": importance,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[arg-type]  # it has what the loss reads
    loss.backward()
    assert current.grad is not None
    return {
        "loss": name,
        "low": low,
        "high": high - 1 if name == "cispo" else high,
        "kl_coef": beta,
        "cap": 1.2 if corrected else None,
        "max_tokens": MAX_TOKENS,
        "lengths": lengths.tolist(),
        "advantages": advantages.tolist(),
        "old": old.tolist(),
        "current": current.tolist(),
        "reference": reference.tolist(),
        "sampler": sampler.tolist(),
        "value": loss.item(),
        "gradient": current.grad.tolist(),
    }


if __name__ == "__main__":
    cases = [
        case(name, beta, corrected, seed)
        for seed, name in enumerate(CASES)
        for beta, corrected in ((0.0, False), (0.1, False), (0.1, True))
    ]
    output = Path(__file__).with_name("trl_losses.json")
    output.write_text(json.dumps({"trl": __version__, "cases": cases}) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases of TRL {__version__} -> {output}")

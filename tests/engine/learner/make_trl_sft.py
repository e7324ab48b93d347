"""Write trl_sft.json: the loss and the LoRA's gradient that TRL's SFTTrainer computes, as a reference for cross_entropy.

Run it in an environment of its own, from the root of the project:

    pip install trl==1.4.0 accelerate datasets . && python -m tests.engine.learner.make_trl_sft

A row is a whole conversation. TRL trains the tokens of its assistant's turns in one row; here each turn is a sample, and
the prompt that they share is computed once.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from trl import __version__
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from offbook.base.config import LoraOptions
from offbook.engine.learner.model.policy import Policy
from tests.engine.learner.tiny_models import VOCABULARY, exact, warm, write_base

TURNS = ([(3, 4), (2, 3), (2, 5)], [(6, 1)], [(1, 7), (4, 2)])
"""For each conversation, its turns: tokens before the assistant's message, and of the message."""


def conversations() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(6)
    rows: list[dict[str, list[int]]] = []
    for turns in TURNS:
        mask = [bit for before, own in turns for bit in (*[0] * before, *[1] * own)]
        ids = torch.randint(1, VOCABULARY, (len(mask),), generator=generator).tolist()
        rows.append({"input_ids": ids, "assistant_masks": mask})
    return rows


def main() -> None:
    rows = conversations()
    with tempfile.TemporaryDirectory() as folder:
        base = write_base(Path(folder) / "base", "qwen2")
        policy = exact(warm(Policy.load(base, LoraOptions(r=2, alpha=4), dtype=torch.float64)))
        options = SFTConfig(
            output_dir=folder,
            dataset_kwargs={"skip_prepare_dataset": True},
            packing=False,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            eos_token=None,
            pad_token="<|endoftext|>",
        )
        trainer = SFTTrainer(policy.model, options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
        examples = trainer.train_dataset
        assert examples is not None
        inputs = trainer.data_collator([examples[i] for i in range(len(rows))])
        policy.model.zero_grad(set_to_none=True)
        loss = trainer.compute_loss(policy.model, inputs)
        loss.backward()
        parameters = policy.trainable_parameters()
        gradient = {name: value.grad.tolist() for name, value in parameters.items() if value.grad is not None}
        assert gradient.keys() == parameters.keys()
    output = Path(__file__).with_name("trl_sft.json")
    content = {"trl": __version__, "rows": rows, "loss": loss.item(), "gradient": gradient}
    output.write_text(json.dumps(content) + "\n", encoding="utf-8")
    print(f"{len(rows)} conversations, loss {loss.item():.6f} by TRL {__version__} -> {output}")


def tokenizer():
    """A tokenizer for the padding; the ids of the rows are given."""
    from transformers import AutoTokenizer

    from offbook import tiny

    return AutoTokenizer.from_pretrained(tiny.path())


if __name__ == "__main__":
    main()

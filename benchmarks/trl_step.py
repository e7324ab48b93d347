"""One training step of TRL 1.4's GRPOTrainer: `learner_step.py` runs this in TRL's own environment.

argv: the base model's folder, threads, wall|cpu, and the tokens of one micro-batch (gradient accumulation). Each line of stdin is a list of {"prompt", "completion", "mask"}; the
answer is a line with the seconds of loss, backward, clip and AdamW.
"""

import json
import os
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the libraries print is no answer


def make_trainer(base, folder):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<pad>",
    )
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=8,
        num_generations=8,
        beta=0.0,
        loss_type="grpo",
        optim="adamw_torch",
        report_to=[],
        learning_rate=1e-5,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def as_inputs(rows):
    """Prompts padded on the left, completions on the right, as GRPOTrainer pads them."""
    prompt = max(len(row["prompt"]) for row in rows)
    completion = max(len(row["completion"]) for row in rows)

    def left(values, fill):
        return [fill] * (prompt - len(values)) + values

    def right(values, fill):
        return values + [fill] * (completion - len(values))

    return {
        "prompt_ids": torch.tensor([left(row["prompt"], 0) for row in rows]),
        "prompt_mask": torch.tensor([left([1] * len(row["prompt"]), 0) for row in rows]),
        "completion_ids": torch.tensor([right(row["completion"], 0) for row in rows]),
        "completion_mask": torch.tensor([right([1] * len(row["completion"]), 0) for row in rows]),
        "tool_mask": torch.tensor([right(row["mask"], 0) for row in rows]),
        "advantages": torch.randn(len(rows)),
    }


def micro_batches(rows, row_tokens):
    longest = max(len(row["prompt"]) + len(row["completion"]) for row in rows)
    size = max(1, row_tokens // longest)
    for start in range(0, len(rows), size):
        yield as_inputs(rows[start : start + size])


def main():
    base, threads, clock, row_tokens = sys.argv[1:]
    torch.set_num_threads(int(threads))
    now = time.perf_counter if clock == "wall" else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(base, folder)
        assert trainer.model is not None
        model = trainer.model.train()
        parameters = [value for value in model.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-5)
        for line in sys.stdin:
            batches = list(micro_batches(json.loads(line), int(row_tokens)))
            start = now()
            trainer.current_gradient_accumulation_steps = len(batches)
            for inputs in batches:
                trainer.compute_loss(model, inputs).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ANSWERS.write(f"{now() - start}\n")
            ANSWERS.flush()


if __name__ == "__main__":
    main()

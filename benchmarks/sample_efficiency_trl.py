"""The order desk's first call learned by TRL's GRPOTrainer: `sample_efficiency.py` runs this in TRL's own environment.

stdin: the JSON of `trl_job`. stdout: a line with the curve. Rate, LoRA, requests and their order are those of the other side; all else
are TRL's defaults.
"""

import json
import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the libraries print is no answer
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def right(text, tool, arguments):
    """1 if the first tool call of an answer is the right one, else 0."""
    body = text.partition(OPEN)[2].partition(CLOSE)
    try:
        call = json.loads(body[0]) if body[1] else {}
    except ValueError:
        return 0.0
    return float(isinstance(call, dict) and call.get("name") == tool and call.get("arguments") == arguments)


class Measuring(TrainerCallback):
    """Samples the held-out requests every few steps."""

    def __init__(self, job, tokenizer):
        self.job, self.tokenizer = job, tokenizer
        self.rollouts, self.rates = [], []

    def on_step_end(self, args, state, control, model=None, **others):
        """Measure if this step is due."""
        if state.global_step % self.job["every"] == 0:
            self.rollouts.append(state.global_step * self.job["group_size"] * self.job["scenarios"])
            self.rates.append(round(self.rate(model, greedy=False), 4))

    @torch.no_grad()
    def rate(self, model, *, greedy):
        """The share of the held-out requests whose first call is right."""
        rows = self.job["test"]
        longest = max(len(row["prompt_ids"]) for row in rows)
        pads = [longest - len(row["prompt_ids"]) for row in rows]
        ids = torch.tensor([[0] * pad + list(row["prompt_ids"]) for pad, row in zip(pads, rows, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        model.eval()
        answers = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=self.job["max_tokens"], pad_token_id=0, **sampling
        )
        model.train()
        texts = self.tokenizer.batch_decode(answers[:, longest:])
        return sum(right(text, row["tool"], row["arguments"]) for text, row in zip(texts, rows, strict=True)) / len(
            rows
        )


def main():
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job["base"])
    rows = [{**row, "prompt": tokenizer.decode(row["prompt_ids"])} for row in job["train"]]
    for row in rows:
        assert tokenizer(row["prompt"])["input_ids"] == list(row["prompt_ids"]), row["prompt"]
        del row["prompt_ids"]

    def reward(completion_ids, tool, arguments, **others) -> list[float | None]:
        texts = tokenizer.batch_decode(completion_ids)
        return [right(*each) for each in zip(texts, tool, arguments, strict=True)]

    measuring = Measuring(job, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=job["group_size"] * job["scenarios"],
            gradient_accumulation_steps=1,
            num_generations=job["group_size"],
            max_completion_length=job["max_tokens"],
            learning_rate=job["learning_rate"],
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            max_steps=job["steps"],
            seed=job["seed"],
            report_to=[],
            save_strategy="no",
            logging_steps=1,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[measuring],
        )
        trainer.train()
        train = [round(entry["reward"], 4) for entry in trainer.state.log_history if "reward" in entry]
        greedy = round(measuring.rate(trainer.model, greedy=True), 4)
    curve = {"rollouts": measuring.rollouts, "held_out": measuring.rates, "train": train, "greedy": greedy}
    ANSWERS.write(json.dumps(curve | {"version": trl.__version__}) + "\n")


if __name__ == "__main__":
    main()

"""A learner step on a GPU: the token tree against plain rows, FlexAttention against a dense mask and against segments.

    python benchmarks/gpu.py --output FOLDER

Needs torch, transformers and peft, nothing else and no download: Qwen2.5's 0.5B and 7B shapes get random weights on the
device. A step is forward and backward of a group's rows (LoRA r = 16 on all linear layers, 7B with gradient
checkpointing), no optimizer. gpu.json and gpu.md are written after every measurement; a part that runs out of memory
says so and the rest goes on; the run ends within 9 minutes on an H100 (--budget), and what did not fit is named.
On a CPU it takes `--shape micro`, in seconds: a test of this script, no measurement.

The float32 shape is computed a second time in 16 bits: how far rounding alone moves each way's gradient.
benchmarks/results/gpu.md has the first lines of one H100.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import peft
import torch
import transformers
from gpu_cases import DENSE, GROUPS, SHAPES, SMALL, WAYS, Group, Shape, Way
from gpu_report import PEAKS, markdown
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from offbook.engine.learner.model import attention
from offbook.engine.learner.model.lora_linear import compute_in_sixteen_bits
from offbook.engine.learner.model.target_logprobs import target_logprobs
from offbook.engine.learner.rows.cost import ModelShape
from offbook.engine.learner.rows.layouts import ComputeRow, LayoutPlan, plan
from offbook.engine.sampling import TargetSettings

if TYPE_CHECKING:
    from offbook.engine.protocol import Sample

CALL_FLOPS = {"cpu": 2e5, "cuda": 5e8}  # as policy.py


@dataclass
class Measured:
    """One line of the table. Times in seconds of one step; `note` says why numbers are missing."""

    shape: str
    group: str
    way: str
    planned: bool = False
    useful_tokens: int = 0
    computed_tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    flops: float = 0.0
    peak_gib: float | None = None
    gradient_difference: float | None = None
    note: str = ""


class DenseTree:
    """The tree's mask as a whole, [T, T]; what `dense_attention` takes in place of a TreeContext."""

    def __init__(self, subtree_end: np.ndarray, device: torch.device) -> None:
        end = torch.from_numpy(subtree_end).to(device)
        at = torch.arange(len(subtree_end), device=device)
        self.mask = ((at[None] <= at[:, None]) & (at[:, None] < end[None]))[None, None]


def dense_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    tree = kwargs.pop("offbook_tree")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=tree.mask, scale=kwargs["scaling"])
    return out.transpose(1, 2).contiguous(), None


class Learner:
    """A model of random weights with a warm adapter."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        attention.register()
        AttentionInterface.register(DENSE, dense_attention)
        torch.manual_seed(0)
        with device:
            base = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=attention.NAME)
            lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = peft.get_peft_model(base, lora)
        self.adapted = compute_in_sixteen_bits(self.model)  # the layers that users get, in 16 bits
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        for name, value in self.model.named_parameters():
            if "lora_B" in name:  # zero in a fresh adapter, and then A has no gradient to compare
                torch.nn.init.normal_(value, std=0.02)
        if shape.exact:  # the same weights in 16 bits
            for value in self.model.parameters():
                if not value.requires_grad:
                    value.data.copy_(value.data.to(torch.bfloat16))
        self.model.train(shape.checkpointing)  # transformers checkpoints in training mode only; there is no dropout
        if shape.checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        self.device, self.base = device, base
        head = base.get_output_embeddings()
        config = shape.config()
        frozen = [p for p in base.parameters() if not p.requires_grad and p.ndim >= 2]
        tables = {id(head.weight), id(base.get_input_embeddings().weight)}
        self.attention = attention.choose(
            head.weight.device, dtype, shape.heads, shape.kv_heads, config.hidden_size // shape.heads
        )
        self.shape = ModelShape(
            layers=shape.layers,
            heads=shape.heads,
            head_dim=config.hidden_size // shape.heads,
            linear=sum(p.numel() for p in frozen if id(p) not in tables),
            lora=sum(p.numel() for p in self.parameters),
            head=head.weight.numel(),
            call_flops=CALL_FLOPS[device.type],
            attention=self.attention.name,
        )

    def take_weights(self, other: Learner) -> None:
        """Copy all weights of a model of the same shape."""
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                mine.copy_(theirs)

    def step(self, made: LayoutPlan, way: Way, targets: TargetSettings, coefficients: Tensor) -> None:
        """Adds the gradient of sum(coefficient x logprob) to the adapter's, row by row."""
        self.base.config._attn_implementation = DENSE if way.attention == DENSE else attention.NAME
        for row in made.rows:
            weight = coefficients[torch.from_numpy(row.target_numbers).to(self.device)]
            (self._logprobs(row, way, targets) * weight).sum().backward()

    def _logprobs(self, row: ComputeRow, way: Way, targets: TargetSettings) -> Tensor:
        ids, positions = (torch.from_numpy(part).to(self.device) for part in (row.token_ids, row.positions))
        tree: dict[str, Any] = {}
        if row.forest is not None:
            forest = row.forest
            tree["offbook_tree"] = (
                DenseTree(forest.subtree_end, self.device)
                if way.attention == DENSE
                else attention.TreeContext(forest.segments, forest.pieces, forest.subtree_end, way.attention)  # type: ignore[arg-type]
            )
        hidden = self.base.model(input_ids=ids, position_ids=positions, use_cache=False, **tree).last_hidden_state
        logprobs, _, _ = target_logprobs(
            hidden.flatten(0, 1),
            row.target_predictors,
            targets,
            row.target_numbers,
            self.base.get_output_embeddings(),
            chunk=512,
            head_trains=False,
        )
        return logprobs

    def gradient(self) -> list[Tensor]:
        """The adapter's gradients, taken away from it."""
        found = [value.grad for value in self.parameters]
        for value in self.parameters:
            value.grad = None
        return [grad for grad in found if grad is not None]


class Run:
    """All measurements of one call of this script."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.repeats, self.row_tokens = options.repeats, options.row_tokens
        self.output: Path = options.output
        self._end = time.monotonic() + options.budget
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        known = next((value for part, value in PEAKS if part in name), None)
        self.facts: dict[str, Any] = {
            "device": name,
            "peak_tflops": options.peak_tflops or known,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "row_tokens": self.row_tokens,
            "attention": {},
        }
        self.lines: list[Measured] = []

    def shape(self, shape: Shape) -> None:
        """Measure every group and way on one model, which is gone afterwards."""
        groups = SMALL if self.device.type == "cpu" else GROUPS
        print(f"{shape.name}: making the model", flush=True)
        self._dynamo_reset()
        made: list[Learner] = []
        note = self._guarded(lambda: made.append(Learner(shape, self.device, self._dtype(shape))))
        if note:
            self._add(Measured(shape.name, "all", "all", note=note))
            return
        learner = made.pop()
        self.facts["attention"][shape.name] = asdict(learner.attention)
        references: list[list[Tensor]] = [[] for _ in groups]
        for group, reference in zip(groups, references, strict=True):
            self._group(learner, shape, group, reference)
        if shape.exact:
            rounded = replace(shape, name=f"{shape.name.removesuffix(', float32')}, bfloat16")
            lower = Learner(rounded, self.device, torch.bfloat16)
            lower.take_weights(learner)
            for group, reference in zip(groups, references, strict=True):
                self._group(lower, rounded, group, reference)
        del learner
        self._free()

    def _group(self, learner: Learner, shape: Shape, group: Group, reference: list[Tensor]) -> None:
        """Measure every way. The first one's gradients are added to an empty `reference`, and all are compared with it."""
        rows = cast("list[Sample]", group.rows(shape.vocabulary))
        ids = np.concatenate([row.completion_ids for row in rows]).astype(np.int64)
        ones = np.ones(len(ids))
        targets = TargetSettings(ids, ones, ones, np.zeros(len(ids), np.int64), 0 * ones)
        coefficients = torch.from_numpy(np.random.default_rng(1).normal(size=len(ids)) / len(ids)).to(self.device)
        whole = plan(rows, "tree", 10**9, learner.shape)
        planned = plan(rows, "auto", self.row_tokens, learner.shape).layout
        for way in WAYS[self.device.type]:
            line = Measured(shape.name, group.name, way.name, useful_tokens=whole.tokens)
            made = plan(rows, way.layout, self.row_tokens, learner.shape)
            line.planned = planned == way.layout and way.attention in (None, learner.attention.name)
            line.computed_tokens = made.tokens
            line.flops = 0.0 if shape.exact else made.flops[way.layout]  # the peak is that of 16 bits
            if way.attention == "flex" and learner.attention.name != "flex":
                line.note = f"not used: {learner.attention.reason}"
            else:
                step = self._step_of(learner, made, way, targets, coefficients)
                line.note = self._guarded(lambda: self._measure(learner, step, line, reference, shape.exact))  # noqa: B023
            learner.gradient()
            self._free()
            self._add(line)

    @staticmethod
    def _step_of(learner: Learner, made: LayoutPlan, way: Way, targets: TargetSettings, coefficients: Tensor):
        return lambda: learner.step(made, way, targets, coefficients)

    def _measure(
        self, learner: Learner, step: Callable[[], None], line: Measured, reference: list[Tensor], exact: bool
    ) -> None:
        """One step whose gradients are compared (it compiles and warms up), then the timed ones."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        found = learner.gradient()
        if not reference:
            reference.extend(found)
        pairs = zip(found, reference, strict=True)
        line.gradient_difference = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        del found
        for _ in range(1 if exact else self.repeats):
            if line.seconds and time.monotonic() + max(line.seconds) > self._end:
                break
            self._wait()
            started = time.perf_counter()
            step()
            self._wait()
            line.seconds.append(time.perf_counter() - started)
            learner.gradient()
        if self.device.type == "cuda":
            line.peak_gib = torch.cuda.max_memory_allocated() / 2**30

    def _guarded(self, part: Callable[[], None]) -> str:
        """Runs a part and says why it did not work; the rest goes on without it."""
        if time.monotonic() > self._end:
            return "not run: the time budget is used up"
        try:
            part()
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:  # noqa: BLE001  # one way's failure is a line of the table
            return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return ""

    def _add(self, line: Measured) -> None:
        self.lines.append(line)
        result = f"{statistics.median(line.seconds):.3f} s" if line.seconds else ""
        print(f"  {line.shape} | {line.group} | {line.way}: {result} {line.note}".rstrip(), flush=True)
        rows = [asdict(line) for line in self.lines]
        self.output.mkdir(parents=True, exist_ok=True)
        written = json.dumps({"facts": self.facts, "rows": rows}, indent=1)
        (self.output / "gpu.json").write_text(written + "\n", encoding="utf-8")
        (self.output / "gpu.md").write_text(markdown(self.facts, rows), encoding="utf-8")

    def _dtype(self, shape: Shape) -> torch.dtype:
        if shape.exact or self.device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @staticmethod
    def _dynamo_reset() -> None:
        attention.choose.cache_clear()
        torch._dynamo.reset()  # each model compiles its own kernels, and their number is limited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu.json and gpu.md")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeatable; default: check, 0.5B, 7B on CUDA")
    parser.add_argument("--device", choices=sorted(WAYS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps after the first, which is not timed")
    parser.add_argument("--row-tokens", type=int, default=16_384, help="tokens of one forward and backward")
    parser.add_argument("--budget", type=float, default=450, help="seconds after which nothing new is started")
    parser.add_argument("--peak-tflops", type=float, help="dense 16-bit peak of the device, for the utilisation")
    options = parser.parse_args()
    run = Run(options)
    default = ["micro"] if run.device.type == "cpu" else ["check", "0.5B", "7B"]
    for name in options.shape or default:
        run.shape(SHAPES[name])
    failed = [line for line in run.lines if line.note.startswith("failed")]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(run.lines)} measurements failed: see the table")


if __name__ == "__main__":
    main()

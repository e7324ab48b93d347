"""The policy in training: a frozen base model with one LoRA adapter, and the logprobs of rows under it."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers and peft build their classes at run time and carry partial types.

from __future__ import annotations

import datetime
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from offbook.base.config import LoraOptions
from offbook.base.errors import ConfigError, EngineError
from offbook.engine.base_model import attention_sizes
from offbook.engine.chat_template import ChatTemplate, end_tokens
from offbook.engine.checkpoint_files import ADAPTER
from offbook.engine.learner.rows.cost import ModelShape
from offbook.engine.learner.rows.layouts import ComputeRow
from offbook.engine.sampling import TargetSettings

from . import attention, loaders, unsloth_attention, unsloth_loader
from .loaders import Loader, adaptable_layers, left_out
from .lora_linear import compute_in_sixteen_bits
from .target_logprobs import capped, target_logprobs

_NAMED = 5
"""Tensors that do not fit and are named in the error."""
CALL_FLOPS = {"cpu": 2e5, "cuda": 5e8}
"""Operations that a device does while one kernel launches: 4 us at 50 GFLOP/s, 5 us at 100 TFLOP/s. Devices other than
cpu use cuda's value."""


class Policy:
    """One base model and its adapter. Not thread-safe.

    `tree_refused`: why the model cannot train on trees, else None. `tree_difference`: the mask probe's largest logprob
    difference between tree and plain rows, nats. `tree_calls`: attention layers computed on trees so far, in forward
    passes. `shape`: input of the cost estimates."""

    def __init__(
        self,
        model: PeftModel,
        tokenizer: Callable[[], PreTrainedTokenizerBase],
        tree_refused: str | None,
        lora: LoraOptions,
        loader: Loader = "peft",
    ) -> None:
        self.tree_refused = tree_refused
        self.loader: Loader = loader
        self.tree_difference: float | None = None
        self.tree_calls = 0
        self.prompt_date: datetime.date | None = None
        self._model = model
        self._tokenizer = tokenizer
        self._lora: LoraOptions | None = lora
        self._read_model()

    @classmethod
    def load(
        cls,
        base: Path,
        lora: LoraOptions,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        threads: int | None = None,
        deterministic: bool = False,
        loader: Literal["auto", "peft", "unsloth"] = "peft",
        load_in_4bit: bool = False,
        name: str | None = None,
    ) -> Policy:
        """Load the base in folder `base` and add a fresh adapter. Raises ConfigError, OSError.

        `name`: the base's name in saved adapters (default: the folder). `threads` and `deterministic` apply to the
        whole process. So does Unsloth's patching of transformers: import Unsloth before this module."""
        if threads is not None:
            torch.set_num_threads(threads)
        if deterministic:
            torch.use_deterministic_algorithms(True)
        chosen = unsloth_loader.choose(loader, device)
        model = loaders.load_base(base, chosen, device, dtype, four_bit=load_in_4bit)
        model.name_or_path = name or str(base)  # what PEFT writes as the adapter's base

        def tokenizer() -> PreTrainedTokenizerBase:
            return AutoTokenizer.from_pretrained(base, trust_remote_code=False)

        wrapped = _with_adapter(model, lora, chosen)
        return cls(wrapped, tokenizer, loaders.tree_refused(base), lora, chosen)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base's tokenizer, with its chat template."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerBase):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return str(self.tokenizer.decode(list(ids)))  # pyright: ignore[reportUnknownMemberType]  # transformers' tokenizers are only partly typed

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The base's chat template. Raises ConfigError if it has none."""
        return ChatTemplate(self.tokenizer, self.prompt_date)

    @property
    def longest_context(self) -> int | None:
        """Most tokens of a conversation that the base's positions allow; None: its config does not say."""
        base = cast(PreTrainedModel, self._model.get_base_model())
        return getattr(base.config.get_text_config(), "max_position_embeddings", None)

    @property
    def end_ids(self) -> frozenset[int]:
        """The token ids that end a turn, the same as the sampler's."""
        base = cast(PreTrainedModel, self._model.get_base_model())
        return end_tokens(self.tokenizer, base.generation_config)

    @property
    def model(self) -> PeftModel:
        """The wrapped model, for merging and export."""
        return self._model

    @property
    def lora(self) -> LoraOptions | None:
        """The adapter's options; None when there is no adapter."""
        return self._lora

    @property
    def device(self) -> torch.device:
        """Where the base is now, with its index."""
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The base's precision."""
        return self._head.weight.dtype

    @property
    def four_bit(self) -> bool:
        """Whether the base is held in 4 bits."""
        return bool(getattr(self._model.get_base_model(), "is_loaded_in_4bit", False))

    @property
    def attention(self) -> str:
        """Name of the layers' attention: that for trees if the model can train on them."""
        if self._tree_attention is not None and self.tree_refused is None:
            return self._tree_attention
        return self.attention_of_rows

    @property
    def attention_of_rows(self) -> str:
        """Name of the layers' attention on plain rows."""
        return loaders.attention_kind(cast(PreTrainedModel, self._model.get_base_model()))

    @property
    def model_type(self) -> str:
        """The base's architecture, as its config.json names it."""
        return str(cast(PreTrainedModel, self._model.get_base_model()).config.model_type)

    @contextmanager
    def eager_attention(self) -> Generator[None]:
        """Compute plain rows with transformers' `eager` attention inside the block."""
        config = cast(PreTrainedModel, self._model.get_base_model()).config.get_text_config()
        name, config._attn_implementation = config._attn_implementation, "eager"  # pyright: ignore[reportPrivateUsage]  # no public name
        try:
            yield
        finally:
            config._attn_implementation = name  # pyright: ignore[reportPrivateUsage]  # no public name

    @property
    def window(self) -> int | None:
        """The sliding window of the base's layers, or of some of them, in tokens; None: no layer has one."""
        return loaders.sliding_window(cast(PreTrainedModel, self._model.get_base_model()).config.get_text_config())

    @property
    def base_parameters(self) -> int:
        """Number of weights of the frozen base."""
        return sum(_size(value) for value in self._model.parameters() if not value.requires_grad)

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """The names of the base's linear layers, as `target_modules` matches them."""
        return adaptable_layers(cast(PreTrainedModel, self._model.get_base_model()))

    @property
    def left_out(self) -> tuple[str, ...]:
        """What `all-linear` leaves out of a mixture of experts, such as `mlp.experts`."""
        return left_out(cast(PreTrainedModel, self._model.get_base_model()))

    @property
    def vocabulary(self) -> int:
        """Number of token ids: the width of the logits."""
        return int(self._head.weight.shape[0])

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters by name, in the model's order. `reset_adapter` replaces them."""
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def reset_adapter(self, lora: LoraOptions) -> None:
        """Replace the adapter with a fresh one: A random from `lora.seed`, B zero. Create a new optimizer afterwards.
        Raises ConfigError for options that do not fit the base; then there is no adapter until the next reset."""
        self._lora = None
        base = cast(PreTrainedModel, self._model.unload())  # pyright: ignore[reportCallIssue]  # PEFT types it as a Tensor
        self._model = _with_adapter(base, lora, self.loader)
        self._lora = lora
        self._read_model()

    def load_adapter(self, folder: Path) -> None:
        """Load the weights of a saved adapter of the same shape. Raises ConfigError if its shape differs, OSError."""
        saved = PeftConfig.from_pretrained(str(folder))
        own = self._model.peft_config["default"]
        for field in ("r", "lora_alpha"):
            value, wanted = getattr(saved, field, None), getattr(own, field)
            if value != wanted:
                raise ConfigError(f"adapter {folder}: {field} is {value!r}, this model was registered with {wanted!r}")
        weights = load_file(folder / ADAPTER)
        expected = self.adapter_weights()
        if faults := _mismatches(weights, expected):
            raise ConfigError(
                f"adapter {folder}: its layers are not those of this base model and its target_modules "
                f"({len(weights)} tensors in the file, {len(expected)} expected): {'; '.join(faults[:_NAMED])}"
                + f"; and {len(faults) - _NAMED} more"
                * (len(faults) > _NAMED)
            )
        set_peft_model_state_dict(self._model, weights)

    def save_adapter(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, which PEFT and vLLM load. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.adapter_weights().items()}
        save_file(weights, folder / ADAPTER, metadata={"format": "pt"})
        config = self._model.peft_config["default"]
        training, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(str(folder))
        finally:
            config.inference_mode = training

    def adapter_weights(self) -> dict[str, Tensor]:
        """The adapter's tensors by the names that PEFT saves."""
        return get_peft_model_state_dict(self._model, save_embedding_layers=False)

    def row_logprobs(
        self, row: ComputeRow, settings: TargetSettings, *, adapter: bool = True, logits_chunk: int = 512
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logprobs (nats), entropy (nats, detached) and kept (bool) of the row's n targets, each [n], in the order of
        `row.target_numbers`, under their calls' sampling settings. Logprobs are differentiable unless grad is disabled.

        kept is False for a token outside the top-k, top-p or min-p set; its logprob is 0 and has no gradient.
        `adapter=False`: the values under the base. The adapter's dropout is active only if grad is enabled.
        """
        for dropout in self._dropouts:
            dropout.train(torch.is_grad_enabled())
        for module in self._recomputed:
            # Layers recompute in training mode. Not .train(): the base's own dropouts stay off.
            module.training = torch.is_grad_enabled()
        if not adapter:
            with self._model.disable_adapter():
                return self._row_logprobs(row, settings, logits_chunk)
        return self._row_logprobs(row, settings, logits_chunk)

    def _row_logprobs(self, row: ComputeRow, settings: TargetSettings, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        device = self._head.weight.device
        ids = torch.from_numpy(row.token_ids).to(device)
        positions = torch.from_numpy(row.positions).to(device)
        tree = None
        if row.forest is not None:
            if self.tree_refused is not None:
                raise ConfigError(f"layout: this model cannot be trained on a tree: {self.tree_refused}")
            tree = attention.TreeContext(row.forest.segments, row.forest.pieces, row.forest.subtree_end)
        with self._precision():
            output = self._body(input_ids=ids, position_ids=positions, use_cache=False, **self._tree_arguments(tree))
        hidden: Tensor = output.last_hidden_state.flatten(0, 1).to(self.dtype)
        if len(hidden) != ids.numel():
            raise EngineError(f"the base answered {len(hidden)} of {ids.numel()} positions: take --loader peft")
        self.tree_calls += 0 if tree is None else tree.calls
        return target_logprobs(
            hidden,
            row.target_predictors,
            settings,
            row.target_numbers,
            self._logits,
            chunk=chunk,
            head_trains=any(value.requires_grad for value in self._head.parameters()),
        )

    def _logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._head(states)
        if self._logit_cap is None:
            return logits
        return capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), self._logit_cap)

    def _tree_arguments(self, tree: attention.TreeContext | None) -> dict[str, object]:
        """Arguments of the base's forward pass by which the tree reaches the attention layers."""
        if tree is None:
            return {}
        if self._in_unsloth:
            return {unsloth_attention.SLOT: tree}
        return {"offbook_tree": tree, **({"attention_mask": attention.NO_MASK} if self._windowed else {})}

    def _precision(self) -> AbstractContextManager[object]:
        """Autocast for Unsloth's kernels with a 16-bit base, which require it."""
        device = self._head.weight.device.type
        if self.loader == "unsloth" and device == "cuda" and self.dtype != torch.float32:
            return torch.autocast(device, self.dtype)
        return nullcontext()

    def _read_model(self) -> None:
        """Look up the parts of the wrapped model that rows need: body, head, dropouts, attention, shape."""
        base = cast(PreTrainedModel, self._model.get_base_model())
        self._recomputed = [m for m in base.modules() if getattr(m, "gradient_checkpointing", False)]
        self._dropouts = [module for name, module in self._model.named_modules() if ".lora_dropout." in name]
        self._body: nn.Module = getattr(base, base.base_model_prefix)
        self._head = cast(nn.Linear, base.get_output_embeddings())
        self._logit_cap = loaders.logit_cap(base.config)
        self.shape = _shape(base, self.trainable_parameters(), self._head)
        self._tree_attention: attention.AttentionName | None = None
        kind = loaders.attention_kind(base)
        self._windowed = kind == attention.WINDOWED
        self._in_unsloth = unsloth_attention.patched(base)
        if self._in_unsloth:
            self.tree_refused = self.tree_refused or unsloth_attention.install(base)
            self.shape = replace(self.shape, longest_row=int(base.config.get_text_config().max_position_embeddings))
        if self.tree_refused is None and (self._in_unsloth or kind in attention.NAMES):
            names: list[attention.AttentionName] = [
                attention.choose(self._head.weight.device, self.dtype, size.heads, size.kv_heads, size.head_dim).name
                for size in attention_sizes(base.config.get_text_config())
            ]
            self._tree_attention = "runs" if "runs" in names else names[0]
            self.shape = replace(self.shape, attention=self._tree_attention)


def _mismatches(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    faults = [f"{name} is missing" for name in expected if name not in weights]
    faults += [f"{name} belongs to no layer" for name in weights if name not in expected]
    shapes = {
        name: (tuple(weights[name].shape), tuple(value.shape)) for name, value in expected.items() if name in weights
    }
    faults += [f"{name} is {got}, not {wanted}" for name, (got, wanted) in shapes.items() if got != wanted]
    fitting = {name: (weights[name], expected[name].dtype) for name, (got, wanted) in shapes.items() if got == wanted}
    faults += [f"{name} holds {value.dtype}" for name, (value, _) in fitting.items() if not value.is_floating_point()]
    return faults + [
        f"{name} holds values that are not finite"
        for name, (value, dtype) in fitting.items()
        if value.is_floating_point() and not value.to(dtype).isfinite().all()
    ]


def _with_adapter(model: PreTrainedModel, lora: LoraOptions, loader: Loader) -> PeftModel:
    """`model` with a fresh adapter. It is drawn from the seed on the CPU, so it does not depend on device or loader."""
    if loader == "unsloth":
        unsloth_loader.restore(model)
    modules = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    if modules == "all-linear" and left_out(model):
        head = model.get_output_embeddings()
        modules = [name for name in adaptable_layers(model) if model.get_submodule(name) is not head]
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # PEFT types it as int and takes any number
    config = LoraConfig(
        r=lora.r,
        lora_alpha=cast(int, alpha),
        lora_dropout=lora.dropout,
        target_modules=modules,
        exclude_modules=_beside_the_text(model),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"lora.target_modules {lora.target_modules!r}: {error}") from error
    if loader == "unsloth":
        unsloth_loader.prepare(wrapped)
    else:
        compute_in_sixteen_bits(wrapped)
        if model.device.type == "cuda":
            # Layers store only their inputs and are recomputed in the backward pass: a third more compute, far less memory.
            model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped.eval()
    for name, module in wrapped.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module.get_base_layer(), nn.Linear):
            raise ConfigError(
                f"lora.target_modules {lora.target_modules!r}: {name.removeprefix('base_model.model.')} is no linear layer, "
                "and the sampler adapts no other"
            )
    if model.dtype == torch.float64:
        wrapped.to(torch.float64)
    return wrapped


def _beside_the_text(model: PreTrainedModel) -> str | None:
    """A pattern of the modules beside the text layers, such as a vision tower; None: there are none. Calls are text, so
    an adapter there would learn nothing."""
    body: nn.Module = getattr(model, model.base_model_prefix)
    text = cast(nn.Module, model.get_decoder())
    if text is body:
        return None
    others = [
        name for name, child in body.named_children() if child is not text and any(True for _ in child.parameters())
    ]
    return rf"{model.base_model_prefix}\.({'|'.join(others)})(\..*)?" if others else None


def _size(weight: Tensor) -> int:
    """Number of elements of a weight; bitsandbytes packs two into a byte."""
    packed = getattr(weight, "quant_state", None)
    return int(packed.shape.numel()) if packed is not None else weight.numel()


def _shape(base: PreTrainedModel, trainable: dict[str, nn.Parameter], head: nn.Linear) -> ModelShape:
    config = base.config.get_text_config()
    sizes = attention_sizes(config)
    tables = {id(head.weight), *(id(m.weight) for m in base.modules() if isinstance(m, nn.Embedding))}
    frozen = [p for p in base.parameters() if not p.requires_grad and p.ndim >= 2 and id(p) not in tables]
    shape = ModelShape(
        layers=int(config.num_hidden_layers),
        heads=max(size.heads for size in sizes),
        head_dim=max(size.head_dim for size in sizes),
        linear=sum(_size(p) for p in frozen),
        lora=sum(p.numel() for p in trainable.values()),
        head=head.weight.numel(),
    )
    return replace(shape, call_flops=CALL_FLOPS["cpu" if head.weight.device.type == "cpu" else "cuda"])

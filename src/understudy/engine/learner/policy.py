"""The policy that learns: one frozen base model with one LoRA adapter, and the logprobs of its rows."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers and peft build their classes at run time and carry partial types.

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...config import LoraOptions
from ...errors import ConfigError, EngineError
from ..checkpoint_files import ADAPTER
from ..ends import end_tokens
from . import attention, loaders, unsloth_loader
from .cost import ModelShape
from .layouts import ComputeRow
from .loaders import Loader
from .target_logprobs import TargetSettings, target_logprobs

CALL_FLOPS = {"cpu": 2e5, "cuda": 5e8}
"""Operations done in one kernel launch: 4 us at 50 GFLOP/s, 5 us at 100 TFLOP/s. Other devices count as cuda."""


class Policy:
    """One base model and its adapter. Not safe for threads."""

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
        """What the mask probe measured between tree and plain rows, nats."""
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
        """The base in folder `base`, with a fresh adapter. `name` is written into saved adapters as their base (default:
        the folder). `threads` and `deterministic` hold for the whole process, as does Unsloth, which should have been
        imported before this module. Raises ConfigError, OSError."""
        if threads is not None:
            torch.set_num_threads(threads)
        if deterministic:
            torch.use_deterministic_algorithms(True)
        chosen = unsloth_loader.choose(loader, device)
        model = loaders.load_base(base, chosen, device, dtype, four_bit=load_in_4bit)
        model.name_or_path = name or str(base)  # what PEFT writes as the adapter's base

        def tokenizer() -> PreTrainedTokenizerBase:
            return AutoTokenizer.from_pretrained(base)

        return cls(_with_adapter(model, lora, chosen), tokenizer, loaders.tree_refused(base), lora, chosen)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base's tokenizer, with its chat template."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerBase):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a turn, as the sampler has them."""
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
    def dtype(self) -> torch.dtype:
        """The base's precision."""
        return self._head.weight.dtype

    @property
    def four_bit(self) -> bool:
        """Whether the base is held in 4 bits."""
        return bool(getattr(self._model.get_base_model(), "is_loaded_in_4bit", False))

    @property
    def attention(self) -> str:
        """Which attention the layers run, trees where they may be trained."""
        if self._tree_attention is not None and self.tree_refused is None:
            return self._tree_attention
        return loaders.attention_kind(cast(PreTrainedModel, self._model.get_base_model()))

    @property
    def base_parameters(self) -> int:
        """Weights of the frozen base."""
        return sum(_size(value) for value in self._model.parameters() if not value.requires_grad)

    @property
    def vocabulary(self) -> int:
        """How many token ids the logits cover."""
        return int(self._head.weight.shape[0])

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters by name, in the model's order. `reset_adapter` makes new ones."""
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def reset_adapter(self, lora: LoraOptions) -> None:
        """Replace the adapter by a fresh one: A drawn from `lora.seed`, B zero. Optimizers must be made again.
        Raises ConfigError for options that do not fit the base; then there is no adapter until the next reset."""
        self._lora = None
        base = cast(PreTrainedModel, self._model.unload())  # pyright: ignore[reportCallIssue]  # PEFT types it as a Tensor
        self._model = _with_adapter(base, lora, self.loader)
        self._lora = lora
        self._read_model()

    def load_adapter(self, folder: Path) -> None:
        """Take the weights of a saved adapter of the same shape. Raises ConfigError when it does not fit, OSError."""
        saved = PeftConfig.from_pretrained(str(folder))
        here = self._model.peft_config["default"]
        for field in ("r", "lora_alpha"):
            if getattr(saved, field, None) != getattr(here, field):
                found, wanted = getattr(saved, field, None), getattr(here, field)
                raise ConfigError(f"adapter {folder}: {field} is {found!r}, this model was registered with {wanted!r}")
        weights = load_file(folder / ADAPTER)
        expected = self.adapter_weights()
        if {name: value.shape for name, value in weights.items()} != {n: v.shape for n, v in expected.items()}:
            raise ConfigError(
                f"adapter {folder}: its layers are not those of this base model and its target_modules "
                f"({len(weights)} tensors in the file, {len(expected)} expected)"
            )
        set_peft_model_state_dict(self._model, weights)

    def save_adapter(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, as PEFT and vLLM load them. Raises OSError."""
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
        """The adapter's tensors under the names that PEFT saves."""
        return get_peft_model_state_dict(self._model, save_embedding_layers=False)

    def row_logprobs(
        self, row: ComputeRow, targets: TargetSettings, *, adapter: bool = True, logits_chunk: int = 512
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logprobs [n], entropy [n] (detached, nats), kept [n] bool of the row's targets, in the order of
        `row.target_ids`, under their calls' sampling settings. Differentiable unless grad is off.

        A token outside the kept set has logprob 0, no gradient and kept False. `adapter=False`: the base's. The adapter's
        dropout, if any, acts only where gradients are on.
        """
        for dropout in self._dropouts:
            dropout.train(torch.is_grad_enabled())
        for module in self._recomputed:
            module.training = torch.is_grad_enabled()  # not its children: the base's own dropouts stay off
        if not adapter:
            with self._model.disable_adapter():
                return self._row_logprobs(row, targets, logits_chunk)
        return self._row_logprobs(row, targets, logits_chunk)

    def _row_logprobs(self, row: ComputeRow, targets: TargetSettings, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        device = self._head.weight.device
        ids = torch.from_numpy(row.token_ids).to(device)
        positions = torch.from_numpy(row.positions).to(device)
        tree: dict[str, attention.TreeContext] = {}
        if row.forest is not None:
            if self.tree_refused is not None:
                raise ConfigError(f"layout: this model cannot be trained on a tree: {self.tree_refused}")
            forest = row.forest
            tree["understudy_tree"] = attention.TreeContext(forest.segments, forest.pieces, forest.subtree_end)
        with self._precision():
            output = self._body(input_ids=ids, position_ids=positions, use_cache=False, **tree)
        hidden: Tensor = output.last_hidden_state.flatten(0, 1).to(self.dtype)
        if len(hidden) != ids.numel():
            raise EngineError(f"the base answered {len(hidden)} of {ids.numel()} positions: take --loader peft")
        return target_logprobs(
            hidden,
            row.target_predictors,
            targets,
            row.target_ids,
            self._head,
            chunk=chunk,
            head_trains=any(value.requires_grad for value in self._head.parameters()),
        )

    def _precision(self) -> AbstractContextManager[object]:
        """Unsloth's kernels for 16-bit bases are made to run under autocast."""
        device = self._head.weight.device.type
        if self.loader == "unsloth" and device == "cuda" and self.dtype != torch.float32:
            return torch.autocast(device, self.dtype)
        return nullcontext()

    def _read_model(self) -> None:
        base = cast(PreTrainedModel, self._model.get_base_model())
        self._recomputed = [m for m in base.modules() if getattr(m, "gradient_checkpointing", False)]
        self._dropouts = [module for name, module in self._model.named_modules() if ".lora_dropout." in name]
        self._body: nn.Module = getattr(base, base.base_model_prefix)
        self._head = cast(nn.Linear, base.get_output_embeddings())
        self.shape = _shape(base, self.trainable_parameters(), self._head)
        self._tree_attention: attention.AttentionName | None = None
        if self.tree_refused is None and loaders.attention_kind(base) == attention.NAME:
            kv_heads = int(getattr(base.config.get_text_config(), "num_key_value_heads", None) or self.shape.heads)
            self._tree_attention = attention.choose(
                self._head.weight.device, self.dtype, self.shape.heads, kv_heads, self.shape.head_dim
            ).name
            self.shape = replace(self.shape, attention=self._tree_attention)


def _with_adapter(model: PreTrainedModel, lora: LoraOptions, loader: Loader) -> PeftModel:
    """`model` with a fresh adapter, drawn from the seed on the CPU, whatever the device and the loader."""
    if loader == "unsloth":
        unsloth_loader.restore(model)
    modules = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
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
    elif model.device.type == "cuda":
        # Layers keep only their inputs and are computed again on the way back: a third more computing, a fraction of the memory.
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
    """A pattern for what a model has besides its text layers, such as a vision tower: calls are text, so it learns nothing,
    and the sampler need not adapt it. None when there is nothing."""
    body: nn.Module = getattr(model, model.base_model_prefix)
    text = cast(nn.Module, model.get_decoder())
    if text is body:
        return None
    others = [
        name for name, child in body.named_children() if child is not text and any(True for _ in child.parameters())
    ]
    return rf"{model.base_model_prefix}\.({'|'.join(others)})(\..*)?" if others else None


def _size(weight: Tensor) -> int:
    """How many numbers a weight holds; bitsandbytes packs two into a byte."""
    packed = getattr(weight, "quant_state", None)
    return int(packed.shape.numel()) if packed is not None else weight.numel()


def _shape(base: PreTrainedModel, trainable: dict[str, nn.Parameter], head: nn.Linear) -> ModelShape:
    config = base.config.get_text_config()
    heads = int(config.num_attention_heads)
    tables = {id(head.weight), *(id(m.weight) for m in base.modules() if isinstance(m, nn.Embedding))}
    frozen = [p for p in base.parameters() if not p.requires_grad and p.ndim >= 2 and id(p) not in tables]
    shape = ModelShape(
        layers=int(config.num_hidden_layers),
        heads=heads,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        linear=sum(_size(p) for p in frozen),
        lora=sum(p.numel() for p in trainable.values()),
        head=head.weight.numel(),
    )
    return replace(shape, call_flops=CALL_FLOPS["cpu" if head.weight.device.type == "cpu" else "cuda"])

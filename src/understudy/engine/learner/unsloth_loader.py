"""Unsloth as the loader of the base. It patches transformers for the whole process, so it is imported before it, in the
learner's process only, and only where it is used. No transformers in this module's imports.

Rows go through the base's own layers and PEFT's adapter, as with the other loader; on a GPU Unsloth puts its kernels
under them. What it would change without a word is held off here: it scales RoPE when `max_seq_length` exceeds the
model's own, cuts longer rows, offloads embeddings, swaps the folder for another upload of the model.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from ...errors import ConfigError
from ...extras import install_command

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

CACHE = "UNSLOTH_COMPILE_LOCATION"
"""Unsloth's variable: the folder of the modules that it generates and imports; its default is in the working directory."""
FUSED = frozenset({"llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3"})
"""Architectures whose layers Unsloth rewrites by hand; it compiles the others as they are."""
_VLLM_EXTENSIONS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._rocm_C")
_SETTINGS = {
    "UNSLOTH_DISABLE_STATISTICS": "1",  # it asks the Hub for a file to count its users
    "UNSLOTH_RETURN_LOGITS": "1",  # else its compiled models answer without logits
}


def choose(asked: str, device: str) -> Literal["peft", "unsloth"]:
    """`auto` takes Unsloth where it is installed and the device is CUDA. Raises ConfigError for what cannot be had."""
    if asked not in ("auto", "peft", "unsloth"):
        raise ConfigError(f"loader: unknown loader {asked!r}; allowed: auto, peft, unsloth")
    if asked == "peft" or (asked == "auto" and (not device.startswith("cuda") or not _installed())):
        return "peft"
    if not _installed():
        raise ConfigError(f"loader: unsloth is not installed: {install_command('unsloth')}, or take --loader peft")
    if device == "mps":
        raise ConfigError("loader: unsloth does not serve device 'mps': take --loader peft")
    return "unsloth"


def import_first() -> Any:
    """The package, imported with its settings made. Raises ConfigError when it cannot be imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if CACHE not in os.environ:
        folder = tempfile.mkdtemp(prefix="understudy-unsloth-")  # of this process and account: code is imported from it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[CACHE] = folder
    try:
        with vllm_extensions_hidden():
            return importlib.import_module("unsloth")
    except (ImportError, NotImplementedError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"loader: unsloth cannot be imported ({type(error).__name__}: {error}): {install_command('unsloth')}, or take --loader peft"
        ) from error


@contextmanager
def vllm_extensions_hidden() -> Generator[None]:
    """Unsloth loads vLLM's extensions to see whether they fit CUDA. vLLM for CPUs has one per instruction set, and the one
    that Unsloth loads ends the process (SIGILL) on a CPU without AVX-512; there is no CUDA to fit either."""
    hidden = (
        []
        if torch.version.cuda or torch.version.hip
        else [name for name in _VLLM_EXTENSIONS if name not in sys.modules]
    )
    sys.modules.update(dict.fromkeys(hidden, cast(ModuleType, None)))  # its import is a ModuleNotFoundError then
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def load(
    base: Path, device: str, dtype: torch.dtype, attention: str, longest: int, *, four_bit: bool
) -> PreTrainedModel:
    """The base in folder `base`, without an adapter. `longest`: the model's own number of positions."""
    if dtype == torch.float64:
        raise ConfigError("loader: unsloth knows no float64: take --loader peft")
    model, _ = import_first().FastLanguageModel.from_pretrained(
        str(base),
        max_seq_length=longest,
        dtype=dtype,
        load_in_4bit=four_bit,
        load_in_16bit=not four_bit and dtype != torch.float32,
        device_map={"": device},
        use_gradient_checkpointing="unsloth",
        attn_implementation=attention,
        use_exact_model_name=True,
        fix_tokenizer=False,
        offload_embedding=False,
    )
    for module in (model, getattr(model, model.base_model_prefix)):
        module._unsloth_allow_packed_overlength = True  # rows have any length; positions say where a token is
    return cast("PreTrainedModel", model)


def prepare(model: PeftModel) -> None:
    """Turn on Unsloth's gradient checkpointing and, on a GPU, its kernels for the adapter that PEFT just made."""
    fast = import_first().FastLanguageModel
    base = cast(Any, model.get_base_model())
    if not hasattr(fast, "patch_peft_model"):  # its CPU backend: recomputation by transformers
        base.gradient_checkpointing_enable({"use_reentrant": False})
    elif base.config.model_type in FUSED:
        fast.patch_peft_model(model, use_gradient_checkpointing="unsloth")
    else:
        whole = importlib.import_module("unsloth.models.vision").FastBaseModel
        whole.post_patch_model(model, use_gradient_checkpointing="unsloth")


def restore(model: torch.nn.Module) -> None:
    """Take back what `prepare` put on single layers of an adapter that is gone: the next may not fit it."""
    for module in model.modules():
        own = vars(module)
        for name in ("apply_qkv", "apply_o"):
            own.pop(name, None)
        if getattr(getattr(own.get("forward"), "__func__", None), "__module__", "").startswith("unsloth."):
            del own["forward"]


def _installed() -> bool:
    return importlib.util.find_spec("unsloth") is not None

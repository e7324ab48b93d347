"""Loads the base with Unsloth. Unsloth patches transformers for the whole process. It is therefore imported before
transformers, only in the learner's process, and only if it is used; this module does not import transformers.

Rows run through the base's own layers and PEFT's adapter, as with the other loader; on a GPU Unsloth replaces their
kernels. The arguments below prevent silent changes by Unsloth: it scales RoPE if `max_seq_length` exceeds the model's
own, truncates longer rows, offloads embeddings, and replaces the folder by another upload of the model.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from offbook.base.errors import ConfigError, install_command
from offbook.base.locked_folders import TemporaryFolder

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

CACHE = "UNSLOTH_COMPILE_LOCATION"
"""Unsloth's environment variable for the folder of its generated modules. Its default is in the working directory."""
FUSED = frozenset({"llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3"})
"""Architectures for which Unsloth has hand-written layers; it compiles the layers of others."""
_VLLM_EXTENSIONS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._rocm_C")
_SETTINGS = {
    "UNSLOTH_DISABLE_STATISTICS": "1",  # else it downloads a file from the Hub to count its users
    "UNSLOTH_RETURN_LOGITS": "1",  # else its compiled models return no logits
    "UNSLOTH_OFFLOAD_FP32": "exact",  # else float32 activations above 2 MiB are recomputed from bfloat16
}


def choose(loader: str, device: str) -> Literal["peft", "unsloth"]:
    """Resolve `auto`: Unsloth if it is installed and the device is CUDA, else PEFT. Raises ConfigError for a loader
    that is unknown or unavailable."""
    if loader not in ("auto", "peft", "unsloth"):
        raise ConfigError(f"loader: unknown loader {loader!r}; allowed: auto, peft, unsloth")
    if loader == "peft" or (loader == "auto" and (not device.startswith("cuda") or not _installed())):
        return "peft"
    if not _installed():
        raise ConfigError(f"loader: unsloth is not installed: {install_command('unsloth')}, or take --loader peft")
    if device == "mps":
        raise ConfigError("loader: unsloth does not run on device 'mps': use --loader peft")
    return "unsloth"


def import_first() -> Any:
    """Set Unsloth's environment variables, import it and return the module. Raises ConfigError if the import fails."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if CACHE not in os.environ:
        # Private to this process and account, because code is imported from it. A reference keeps it until the process ends.
        folder = TemporaryFolder("unsloth")
        atexit.register(folder.remove)
        os.environ[CACHE] = str(folder.path)
    try:
        with vllm_extensions_hidden():
            return importlib.import_module("unsloth")
    except (ImportError, NotImplementedError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"loader: unsloth cannot be imported ({type(error).__name__}: {error}): {install_command('unsloth')}, or take --loader peft"
        ) from error


@contextmanager
def vllm_extensions_hidden() -> Generator[None]:
    """Hide vLLM's extensions on CPU-only torch while Unsloth is imported. Unsloth loads them to check that they fit
    CUDA. vLLM for CPUs has one extension per instruction set; the one that Unsloth loads kills the process (SIGILL) on
    a CPU without AVX-512."""
    hidden = (
        []
        if torch.version.cuda or torch.version.hip
        else [name for name in _VLLM_EXTENSIONS if name not in sys.modules]
    )
    sys.modules.update(
        dict.fromkeys(hidden, cast(ModuleType, None))
    )  # importing such a name raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def load(
    base: Path, device: str, dtype: torch.dtype, attention: str, longest: int, *, four_bit: bool
) -> PreTrainedModel:
    """Load the base in folder `base`, without an adapter. `longest`: the model's own maximum number of positions.
    Raises ConfigError."""
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
        trust_remote_code=False,
    )
    for module in (model, getattr(model, model.base_model_prefix)):
        module._unsloth_allow_packed_overlength = True  # rows have any length; position_ids place the tokens
    return cast("PreTrainedModel", model)


def prepare(model: PeftModel) -> None:
    """Enable Unsloth's gradient checkpointing and, on a GPU, its kernels for the new PEFT adapter."""
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
    """Undo `prepare` on the layers after an adapter was removed: the next adapter may have another shape."""
    for module in model.modules():
        own = vars(module)
        for name in ("apply_qkv", "apply_o"):
            own.pop(name, None)
        if getattr(getattr(own.get("forward"), "__func__", None), "__module__", "").startswith("unsloth."):
            del own["forward"]


def _installed() -> bool:
    return importlib.util.find_spec("unsloth") is not None

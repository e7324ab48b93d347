"""Model folders with random weights and a few layers: a family's config class, chat template, special tokens and ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

TEMPLATES = Path(__file__).parent / "templates"
VOCABULARY = 768
SPARE = 8
"""Rows of the embedding without a token, as real models have them."""
CONTEXT = 2048
WINDOW = 24
"""Far shorter than the prompts, so that a wrong window shows."""
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
HEADS = {"head_dim": 32}
TEXT = """Where is order 4821? It left the warehouse on Monday, and it is on its way. Please cancel order 5913: the
customer does not need it any more. Open a ticket about the invoice, say hello, and tell me what the weather is like."""


@dataclass(frozen=True, eq=False)
class Family:
    """What a family's folder holds. `special`: control tokens by their role, `markup`: added tokens that are text too.

    `ends`: what the generation config ends with; `bos`, `eos`: the tokenizer's own. `shows_tools`: its template does.
    """

    name: str
    config: type[PreTrainedConfig]
    eos: str
    pad: str
    ends: tuple[str, ...]
    bos: str | None = None
    special: tuple[str, ...] = ()
    markup: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    shows_tools: bool = True


_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_THINK_TAGS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_CHATML = {"eos": "<|im_end|>", "pad": "<|endoftext|>", "ends": ("<|im_end|>", "<|endoftext|>")}

QWEN2_5 = Family(
    "qwen2_5",
    Qwen2Config,
    **_CHATML,
    special=("<|im_start|>",),
    markup=_TOOL_TAGS,
    changes={"tie_word_embeddings": True},
)
QWEN3 = Family(
    "qwen3", Qwen3Config, **_CHATML, special=("<|im_start|>",), markup=_TOOL_TAGS + _THINK_TAGS, changes=HEADS
)
LLAMA3 = Family(
    "llama3",
    LlamaConfig,
    eos="<|eot_id|>",
    pad="<|finetune_right_pad_id|>",
    ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
    special=("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    changes=HEADS,
)
MISTRAL = Family(
    "mistral",
    MistralConfig,
    eos="</s>",
    pad="<unk>",
    ends=("</s>",),
    bos="<s>",
    special=tuple(
        f"[{mark}]"
        for mark in (
            "INST",
            "/INST",
            "AVAILABLE_TOOLS",
            "/AVAILABLE_TOOLS",
            "TOOL_CALLS",
            "TOOL_RESULTS",
            "/TOOL_RESULTS",
        )
    ),
    changes={**HEADS, "sliding_window": WINDOW},  # as in the first Mistral 7B: every layer
)
GEMMA3 = Family(
    "gemma3",
    Gemma3TextConfig,
    eos="<eos>",
    pad="<pad>",
    ends=("<eos>", "<end_of_turn>"),
    bos="<bos>",
    special=("<unk>", "<start_of_turn>"),
    shows_tools=False,
    changes={
        **HEADS,
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
)
QWEN3_5 = Family(
    "qwen3_5",
    Qwen3_5TextConfig,
    **_CHATML,
    special=("<|im_start|>",),
    markup=_TOOL_TAGS + _THINK_TAGS,
    changes={
        **HEADS,
        "num_hidden_layers": 4,  # three with a state, one with full attention
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
)
SLIDING = (MISTRAL, GEMMA3)
ATTENTION = (QWEN2_5, QWEN3, LLAMA3, *SLIDING)
"""Families whose layers keep no state but keys and values."""


def build(family: Family, folder: Path) -> Path:
    """Write the family's folder; the same one every time."""
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(folder)
    ids: dict[str, int] = tokenizer.get_vocab()
    ends = [ids[end] for end in family.ends]
    bos = ids[family.bos] if family.bos else None
    tokens = {"bos_token_id": bos, "eos_token_id": ends[0], "pad_token_id": ids[family.pad]}
    config = family.config(**{**SHAPE, **family.changes, **tokens})
    torch.manual_seed(3)
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = architecture(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # large enough that every token and every weight matters
                parameter.normal_(std=0.15)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=ids[family.pad])
    model.save_pretrained(folder)
    return folder


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the template's own text, which fills most of a prompt."""
    template = (TEMPLATES / f"{family.name}.jinja").read_text(encoding="utf-8")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    control = [token for token in (family.pad, family.bos, family.eos, *family.ends, *family.special) if token]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - SPARE - len(family.markup),
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(control)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([template, TEXT], trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.markup])
    if family.bos:  # the tokenizers of these families put it before plain text; templates write it themselves
        bos = (family.bos, bpe.token_to_id(family.bos))
        bpe.post_processor = processors.TemplateProcessing(f"{family.bos} $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer

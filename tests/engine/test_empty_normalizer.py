"""Converters of other libraries write an empty sequence where a tokenizer has no normalizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from offbook import tiny
from offbook.engine.chat_template import ChatTemplate


def test_a_tokenizer_with_an_empty_normalizer_gives_the_same_prompts(tmp_path: Path) -> None:
    shutil.copytree(tiny.path(), tmp_path / "base")
    path = tmp_path / "base" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Sequence", "normalizers": []}}))
    plain, empty = (ChatTemplate(AutoTokenizer.from_pretrained(folder)) for folder in (tiny.path(), tmp_path / "base"))
    for text in ("where is order 7?", "<|im_end|> spelled by a user"):
        messages = [{"role": "user", "content": text}]
        assert empty.encode(empty.render(messages)) == plain.encode(plain.render(messages))

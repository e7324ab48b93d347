"""The count of kernels and bytes: what `LoraLinear` saves."""

from __future__ import annotations

import importlib

import pytest

from tests.paths import ROOT


def test_the_adapter_in_sixteen_bits_moves_less_than_half_of_what_peft_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    one_layer = importlib.import_module("layer_kernels").one_layer
    none, before, now = (one_layer(adapter, recompute=False, tokens=512) for adapter in ("none", "peft", "sixteen"))
    assert none.kernels < now.kernels < before.kernels
    added = [count.bytes - none.bytes for count in (now, before)]
    assert 0 < 2 * added[0] < added[1]

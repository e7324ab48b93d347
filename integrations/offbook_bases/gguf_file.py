"""Reads a GGUF file that may be damaged or hostile: every count, length, type and offset is checked before it is used.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` dequantises the blocks; its own reader
takes longer than the whole conversion and checks no bounds.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from offbook.base.errors import ConfigError
from offbook.base.text import printable

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Entry = tuple[str, tuple[int, ...], GGMLQuantizationType, int]
"""Name, shape, type and offset of a tensor."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its code in `struct`."""
_STRING, _ARRAY = 8, 9
MAX_ENTRIES = 10_000
"""Limit of keys and of tensors."""
MAX_ITEMS = 1_000_000
"""Limit of an array's items. The largest vocabularies have 262,144 tokens."""
MAX_DIMENSION = 2**31


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file. `shape` is numpy's, the rows first. `raw` are its blocks, a row of bytes per row."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    raw: Bytes

    def values(self, rows: npt.NDArray[np.intp] | slice) -> Floats:
        """These rows as float32. Raises ConfigError for a type that cannot be dequantised, and values that are not finite."""
        try:
            with np.errstate(all="ignore"):  # reported below
                values = np.asarray(dequantize(self.raw[rows], self.kind), np.float32)
        except NotImplementedError as error:
            raise ConfigError(
                f"tensor {self.name}: blocks of the type {self.kind.name} cannot be read: convert a file with others, such as Q8_0 or F16"
            ) from error
        if not np.isfinite(values).all():
            raise ConfigError(
                f"tensor {self.name}: it holds NaN or infinite weights: the file is damaged, fetch it again"
            )
        return values


class GgufFile:
    """The keys and tensors of a file. Keys are read by type, and a missing or wrong one is a ConfigError."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for whatever is no whole GGUF file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ConfigError(f"{path} cannot be read: {error}") from error
        self._at = 0
        self.keys: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self._read()

    # ---- keys

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        return self._typed(key, str, "a text", default)

    def whole(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        """An integer from `least` to `most`."""
        value = self._typed(key, int, "an integer", default)
        if isinstance(value, bool) or not least <= value <= most:
            raise self.fault(f"{key} is {value!r}, and must be an integer from {least} to {most:,}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._typed(key, float, "a number", default)
        if not (math.isfinite(value) and value > 0):
            raise self.fault(f"{key} is {value!r}, and must be a finite number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._typed(key, bool, "true or false", default)

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        return self._typed(key, list, "a list of texts", None)

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """A list of numbers."""
        return self._typed(key, np.ndarray, "a list of numbers", None)

    def _typed(self, key: str, kind: type[Any], name: str, default: Any) -> Any:
        value = self.keys.get(key, default)
        if value is None:
            raise self.fault(f"it has no key {key}")
        if not isinstance(value, kind):
            raise self.fault(f"{key} is no {name.removeprefix('a ').removeprefix('an ')}")
        return value

    def fault(self, what: str) -> ConfigError:
        """The error of this file."""
        return ConfigError(f"{self.path.name}: {what}: fetch the file again, or convert another")

    # ---- reading

    def _read(self) -> None:
        if bytes(self._take(4, "its mark")) != b"GGUF":
            raise self.fault("it is no GGUF file (it does not begin with GGUF)")
        version = self._scalar("I", "version")
        if version not in (2, 3):
            order = " (it is big-endian)" if version in (2 << 24, 3 << 24) else ""
            raise self.fault(f"its format version is {version}{order}, and 2 or 3 can be read")
        tensors = self._count("tensors", MAX_ENTRIES)
        for _ in range(self._count("keys", MAX_ENTRIES)):
            key = self._string("a key")
            value = self._value(self._scalar("I", key), key)
            if key in self.keys:
                raise self.fault(f"the key {printable(key)} occurs twice")
            self.keys[key] = value
        entries = [self._entry() for _ in range(tensors)]
        alignment = self.whole("general.alignment", 2**16, default=32)
        if alignment & (alignment - 1):
            raise self.fault(f"general.alignment is {alignment}, and must be a power of two")
        self._place(entries, -(-self._at // alignment) * alignment, alignment)

    def _take(self, size: int, what: str) -> memoryview:
        if size > len(self._content) - self._at:
            raise self.fault(
                f"it ends inside {printable(what)}: {size:,} bytes are named at {self._at:,}, of {len(self._content):,}"
            )
        self._at += size
        return self._content[self._at - size : self._at]

    def _scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self._take(size, what))[0]

    def _count(self, what: str, most: int) -> int:
        count = self._scalar("Q", f"the number of {what}")
        if count > most:
            raise self.fault(f"it names {count:,} {printable(what)}, and {most:,} are the limit")
        return count

    def _string(self, what: str) -> str:
        raw = bytes(self._take(self._scalar("Q", what), what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"{printable(what)} is not UTF-8") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise self.fault(f"{printable(key)} has the unknown type {kind}")
        inner = self._scalar("I", key)
        count = self._count(f"items of {key}", MAX_ITEMS)
        if inner == _STRING:
            return [self._string(key) for _ in range(count)]
        if inner not in _SCALARS:
            raise self.fault(f"{printable(key)} is a list of the type {inner}, which is none of numbers or texts")
        kind_of_items = np.dtype(_SCALARS[inner]).newbyteorder("<")
        return np.frombuffer(self._take(count * kind_of_items.itemsize, key), kind_of_items)

    def _entry(self) -> Entry:
        name = self._string("the name of a tensor")
        dimensions = self._scalar("I", name)
        if not 1 <= dimensions <= 4:
            raise self.fault(f"tensor {printable(name)} has {dimensions} dimensions, and 1 to 4 are possible")
        shape = tuple(self._scalar("Q", name) for _ in range(dimensions))[::-1]
        if not all(0 < size < MAX_DIMENSION for size in shape):
            raise self.fault(f"tensor {printable(name)} has the shape {shape}")
        number, offset = self._scalar("I", name), self._scalar("Q", name)
        try:
            return name, shape, GGMLQuantizationType(number), offset
        except ValueError as error:
            raise self.fault(f"tensor {printable(name)} has the unknown type {number}") from error

    def _place(self, entries: list[Entry], start: int, align: int) -> None:
        """Find the tensors' bytes, which may not overlap."""
        end = 0
        for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
            block, size = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise self.fault(
                    f"tensor {printable(name)}: rows of {shape[-1]} values are no whole {kind.name} blocks"
                )
            width, rows = shape[-1] // block * size, math.prod(shape[:-1])
            if offset % align or offset < end:
                raise self.fault(
                    f"tensor {printable(name)} begins at {offset:,}, inside another or not aligned to {align}"
                )
            end = offset + rows * width
            if start + end > len(self._content):
                raise self.fault(
                    f"it ends inside tensor {printable(name)}: {start + end:,} bytes are named, of {len(self._content):,}"
                )
            if name in self.tensors:
                raise self.fault(f"the tensor {printable(name)} occurs twice")
            raw = np.frombuffer(self._content[start + offset : start + end], np.uint8).reshape(rows, width)
            self.tensors[name] = Tensor(name, shape, kind, raw)

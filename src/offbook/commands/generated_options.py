"""Command-line options from the fields of a class: a dataclass whose fields say what they mean, or a pydantic model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

WORDS = (bool, int, float, str, Path)
"""Types of which a word on the command line can be a value; also a Literal, and a union of one with None."""


@dataclass(frozen=True)
class OptionField:
    """A field as an option. `default` is None where the option has none of its own, or `shown_default` stands for it."""

    name: str
    type: Any
    help: str
    default: Any = None
    least: float | None = None
    most: float | None = None
    shown_default: str = ""

    def parameter(self) -> inspect.Parameter:
        """The parameter from which typer makes the option `--field-name`."""
        bounds: dict[str, Any] = {"min": self.least, "max": self.most}
        shown = f"{self.help}  [default: {self.shown_default}]" if self.shown_default else self.help
        described = typer.Option(help=shown, **(bounds if self.type in (int, float) else {}))
        kind = self.type if self.default is not None else self.type | None
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[kind, described]
        )


def with_options(
    *models: type[Any], without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for the function of a command: it adds an option for each field of `models`.

    The function's last parameter, a dict, receives field -> value. A field is missing there if the user did not write its
    option and it has no default of its own (None, or a text that is shown in place of one). A parameter of the function
    with the field's name stands in place of the generated option; `without` leaves fields out.

    A dataclass's field is an option if its metadata has a "meaning" with `help`, `least`, `most` and `default` (the shown
    text), and if a word can be its value (`WORDS`): functions, judges and sinks are left out. Each field of a pydantic
    model is an option, described by its `description`, `ge` and `le`; the model parses those that no word can be.

    >>> from offbook.base.config import LoraOptions
    >>> @with_options(LoraOptions, without=["target_modules"])
    ... def show(name: str, options: dict[str, Any]) -> None:
    ...     print(name, options)
    >>> list(inspect.signature(show).parameters)
    ['name', 'r', 'alpha', 'dropout', 'seed']
    >>> show(name="lora", r=8)
    lora {'r': 8}
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        *own, taken = inspect.signature(function).parameters.values()
        hints = get_type_hints(function, include_extras=True)
        named = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
        replaced = {parameter.name: parameter for parameter in named}
        items = [item for model in models for item in fields_of(model) if item.name not in without]
        generated = [item for item in items if item.name not in replaced]
        options = [replaced.pop(item.name, None) or item.parameter() for item in items]

        @functools.wraps(function)
        def command(*args: Any, **words: Any) -> None:
            values = {item.name: words.pop(item.name, None) for item in generated}
            function(
                *args, **words, **{taken.name: {name: value for name, value in values.items() if value is not None}}
            )

        ordered = sorted([*replaced.values(), *options], key=lambda parameter: parameter.default is not parameter.empty)
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in ordered]
        command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # read by typer
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords} | {"return": None}
        return command

    return decorate


def fields_of(model: type[Any]) -> Iterator[OptionField]:
    """The fields of a dataclass or a pydantic model that can be options."""
    if is_dataclass(model):
        yield from _of_dataclass(model)
    elif issubclass(model, BaseModel):
        yield from _of_pydantic(model)
    else:
        raise TypeError(f"{model!r} is neither a dataclass nor a pydantic model")


def _of_dataclass(model: type[Any]) -> Iterator[OptionField]:
    hints = get_type_hints(model)
    for field in fields(model):
        meaning, kind = field.metadata.get("meaning"), _word_type(hints[field.name])
        if meaning is None or kind is None:
            continue
        default = None if meaning.default or field.default is MISSING else field.default
        yield OptionField(field.name, kind, meaning.help, default, meaning.least, meaning.most, meaning.default)


def _of_pydantic(model: type[BaseModel]) -> Iterator[OptionField]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            continue  # pass it as a model of its own
        default = field.get_default(call_default_factory=True, validated_data={})
        kind, written = _word_type(kind), ""
        if kind is None:
            kind, written, default = str, _as_text(default), None  # the model's own validator reads the text
        bounds = [(getattr(item, "ge", None), getattr(item, "le", None)) for item in field.metadata]
        least = next((low for low, _ in bounds if low is not None), None)
        most = next((high for _, high in bounds if high is not None), None)
        meaning, _, shown = (field.description or "").partition("; None: ")  # what an unset field means
        own = None if default is PydanticUndefined else default
        yield OptionField(name, kind, meaning, own, least, most, shown or written)


def _as_text(default: Any) -> str:
    """A default as it is written on the command line; empty if no word stands for it."""
    values = cast("tuple[Any, ...]", default) if isinstance(default, tuple) else (default,)
    words = [value for value in values if isinstance(value, int | float | str)]
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in words)


def _word_type(annotation: Any) -> Any:
    """The type of the words of an option; None if no word can be the field's value."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _word_type(get_args(annotation)[0])
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return _word_type(kinds[0]) if len(kinds) == 1 else None
    return annotation if annotation in WORDS or origin is Literal else None

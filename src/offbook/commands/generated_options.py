"""Options of a command from option classes: dataclasses of `option()` fields, or pydantic models. Fields marked as `Headline`
are options of the command line; `--set NAME=VALUE` and `--config FILE` set every field."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from offbook.base.errors import ConfigError
from offbook.base.options import HEADLINE

from .help_pages import MORE_OPTIONS

WORDS = (bool, int, float, str, Path)
"""Types of which a word on the command line can be a value; also a Literal, and a union of str or of one of them with None."""


@dataclass(frozen=True)
class OptionField:
    """A field as an option. `annotation`: its type with its range, for pydantic; `word`: the type of a word on the command
    line, None if the field's own validator reads the text; `default`: as help texts show it."""

    name: str
    annotation: Any
    word: Any
    help: str
    default: str
    least: float | None
    most: float | None
    headline: bool
    heading: str

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """The parameter from which typer makes the option."""
        bounds: dict[str, Any] = {"min": self.least, "max": self.most} if self.word in (int, float) else {}
        shown = f"{self.help}  [default: {self.default}]" if self.default else self.help
        heading = self.heading if self.headline else MORE_OPTIONS
        described = typer.Option(help=shown, rich_help_panel=heading, **bounds)
        annotation = Annotated[(self.word or str) | None, described]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def parsed(self, value: str) -> Any:
        """The field's value from a text; `none` is None. Raises ConfigError."""
        if value == "none" and _is_optional(self.annotation):
            return None
        try:
            read: object = json.loads(value) if value[:1] in ("[", "{") else value
            return TypeAdapter(self.annotation, config={"allow_inf_nan": False}).validate_python(read)
        except ValidationError as error:
            faults = error.errors(include_url=False)
            raise ConfigError(f"{self.flag}: {faults[0]['msg']} (got {faults[0]['input']!r})") from error
        except ValueError as error:
            raise ConfigError(f"{self.flag}: not JSON: {error} (got {value!r})") from error


def with_options(
    *models: type[Any], without: Collection[str] = (), unlisted: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for the function of a command: it adds the options of `models`.

    The function's last parameter, a dict, receives field -> value for the fields that the user set; `options_of` has those of
    one class. A parameter of the function with a field's name stands in place of that option; `without` leaves fields out,
    `unlisted` takes headline options off the list. A field of two models is one option. Fields of a dataclass that no word can be are left out: functions, judges, sinks.

    >>> from offbook.base.config import LoraOptions
    >>> @with_options(LoraOptions)
    ... def show(name: str, options: dict[str, Any]) -> None:
    ...     print(name, options)
    >>> list(inspect.signature(show).parameters)
    ['name', 'r', 'alpha', 'dropout', 'target_modules', 'seed']
    >>> show(name="lora", r=8)
    lora {'r': 8}
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        *own, taken = inspect.signature(function).parameters.values()
        hints = get_type_hints(function, include_extras=True)
        named = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
        replaced = {*without, *(parameter.name for parameter in own)}
        options: dict[str, OptionField] = {}
        for item in (item for model in models for item in fields_of(model)):
            if item.name not in replaced:
                listed = item.headline and item.name not in unlisted
                options.setdefault(item.name, replace(item, headline=listed))

        @functools.wraps(function)
        def command(*args: Any, **words: Any) -> None:
            chosen: dict[str, Any] = {}
            for item in options.values():
                if (value := words.pop(item.name, None)) is not None:
                    chosen[item.name] = value if item.word else item.parsed(value)
            function(*args, **words, **{taken.name: chosen})

        ordered = sorted(
            [*named, *(item.parameter() for item in options.values())],
            key=lambda parameter: parameter.default is not parameter.empty,
        )
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in ordered]
        command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # read by typer
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords} | {"return": None}
        return command

    return decorate


def options_of(model: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are options of a model: its field of the same name may hold what no word can be."""
    names = {item.name for item in fields_of(model)}
    return {name: value for name, value in values.items() if name in names}


def fields_of(model: type[Any]) -> Iterator[OptionField]:
    """The fields of a dataclass or a pydantic model that can be options."""
    if is_dataclass(model):
        yield from _of_dataclass(model)
    elif issubclass(model, BaseModel):
        yield from _of_pydantic(model)
    else:
        raise TypeError(f"{model!r} is neither a dataclass nor a pydantic model")


def _of_dataclass(model: type[Any]) -> Iterator[OptionField]:
    hints = get_type_hints(model, include_extras=True)
    for field in fields(model):
        meaning, hint = field.metadata.get("meaning"), hints[field.name]
        word = _word_type(hint)
        if meaning is None or word is None:
            continue
        plain = word | None if _is_optional(hint) else word
        yield OptionField(
            name=field.name,
            annotation=Annotated[plain, Field(ge=meaning.least, le=meaning.most)] if word in (int, float) else plain,
            word=None if _is_optional(hint) and field.default is not None else word,
            help=meaning.help,
            default=meaning.default or ("" if field.default is MISSING else _as_text(field.default)),
            least=meaning.least,
            most=meaning.most,
            headline=_is_headline(hint),
            heading=_heading(model, field.name),
        )


def _of_pydantic(model: type[BaseModel]) -> Iterator[OptionField]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            continue  # pass it as a model of its own
        default = field.get_default(call_default_factory=True, validated_data={})
        bounds = [(getattr(item, "ge", None), getattr(item, "le", None)) for item in field.metadata]
        meaning, _, unset = (field.description or "").partition("; None: ")  # what an unset field means
        yield OptionField(
            name=name,
            annotation=Annotated[(kind, *field.metadata)] if field.metadata else kind,
            word=None if _is_optional(kind) and default is not None else _word_type(kind),
            help=meaning,
            default=unset or ("" if default is PydanticUndefined else _as_text(default)),
            least=next((low for low, _ in bounds if low is not None), None),
            most=next((high for _, high in bounds if high is not None), None),
            headline=HEADLINE in field.metadata,
            heading=_heading(model, name),
        )


def _is_headline(hint: Any) -> bool:
    return get_origin(hint) is Annotated and HEADLINE in get_args(hint)[1:]


def _is_optional(annotation: Any) -> bool:
    return NoneType in get_args(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation)


def _heading(model: type[Any], name: str) -> str:
    """The heading of the class that declares the field."""
    owner = next(base for base in model.__mro__ if name in vars(base).get("__annotations__", {}))
    return getattr(owner, "heading", "Options")


def _as_text(default: Any) -> str:
    """A default as it is written on the command line; empty for False, and if no word stands for it."""
    if isinstance(default, bool):
        return "true" if default else ""
    values = cast("tuple[Any, ...]", default) if isinstance(default, tuple) else (default,)
    words = [value for value in values if isinstance(value, int | float | str | Path)]
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in words)


def _word_type(annotation: Any) -> Any:
    """The type of the words of an option; None if no word can be the field's value."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _word_type(get_args(annotation)[0])
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return str if str in kinds else _word_type(kinds[0]) if len(kinds) == 1 else None
    return annotation if annotation in WORDS or origin is Literal else None

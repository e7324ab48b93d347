"""Options, each written once: a frozen dataclass states an option's default, range and help text; `takes` gives a function
the parameters of that dataclass, for type checkers and at run time; the command line is generated from its fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Concatenate, Final, Generic, ParamSpec, TypeVar, cast, overload

from .errors import ConfigError
from .option_names import check_options

P = ParamSpec("P")
T = TypeVar("T")
Self_ = TypeVar("Self_")
Taken = TypeVar("Taken")
R = TypeVar("R")

HEADLINE: Final = "headline"
Headline = Annotated[T, HEADLINE]
"""The type of a field that commands take as an option of their own. `--set` and `--config` set the other fields."""


@dataclass(frozen=True)
class Meaning:
    """What an option means: its help text, its least and greatest value, and a text for a default that depends."""

    help: str
    least: float | None = None
    most: float | None = None
    default: str = ""


def option(
    default: T, help: str, *, least: float | None = None, most: float | None = None, shown_default: str = ""
) -> T:
    """A field of a RunOptions class. `shown_default` replaces the default in help texts."""
    return field(default=default, metadata={"meaning": Meaning(help, least, most, shown_default)})


def meaning_of(option: Field[Any]) -> Meaning | None:
    """The option's meaning; None for a required argument."""
    return option.metadata.get("meaning")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Base of the options of each kind of run. Raises ConfigError for a value outside its range."""

    heading: ClassVar[str] = "Options"
    """The heading of a class's options in help texts."""

    def __post_init__(self) -> None:
        for item in fields(self):
            meaning, value = meaning_of(item), getattr(self, item.name)
            if meaning is None or meaning.least is None or type(item.default) is not int:
                continue
            if not isinstance(value, int) or value < meaning.least:
                raise ConfigError(f"{item.name}: a whole number of at least {meaning.least} is needed, got {value!r}")

    @property
    def passed(self) -> frozenset[str]:
        """Names of the arguments that the caller of a function of `takes` wrote; the others have their defaults."""
        return self.__dict__.get("_passed", frozenset())

    def passed_to(self, options: type[RunOptions]) -> dict[str, Any]:
        """The passed arguments that are fields of `options`."""
        return {item.name: getattr(self, item.name) for item in fields(options) if item.name in self.passed}


def close_unstarted(values: Iterable[object]) -> None:
    """Close the coroutines among values that have not started, also those in lists and groups: the call that was to run them
    is refused or over, and Python would warn about each."""
    for value in values:
        if inspect.iscoroutine(value):
            if inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
                value.close()
        elif isinstance(value, list | tuple):
            close_unstarted(cast(Iterable[object], value))
        elif isinstance(getattr(type(value), "pending", None), property):  # a TrajectoryGroup's
            close_unstarted(cast(Any, value).pending)


class takes(Generic[P, Taken]):  # a decorator
    """Decorate a function whose last parameter is an object of the class `options`: callers pass the arguments of that
    class instead. An unknown keyword raises ConfigError with the right name; `where` names the function in it."""

    def __init__(self, options: Callable[P, Taken], where: str) -> None:
        self._options = options
        self._where = where
        self._parameters = list(inspect.signature(options).parameters.values())
        self._known = [item.name for item in self._parameters if item.kind is not item.VAR_KEYWORD]
        self._open = len(self._known) < len(self._parameters)

    @overload
    def __call__(self, function: Callable[[Taken], R]) -> Callable[P, R]: ...

    @overload
    def __call__(self, function: Callable[[Self_, Taken], R]) -> Callable[Concatenate[Self_, P], R]: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function)
        before = list(own.parameters.values())[:-1]

        def bound(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
            try:
                return (*args[: len(before)], self._build(args[len(before) :], keywords))
            except Exception:
                close_unstarted((*args, *keywords.values()))
                raise

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            return function(*bound(args, keywords))

        @functools.wraps(function)
        async def call_async(*args: Any, **keywords: Any) -> Any:
            return await function(*bound(args, keywords))

        decorated: Any = call_async if inspect.iscoroutinefunction(function) else call
        decorated.__signature__ = own.replace(parameters=[*before, *self._parameters])
        decorated.__doc__ = "\n\n".join(text for text in (inspect.getdoc(function), self._listed()) if text)
        return decorated

    def _build(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Taken:
        if not self._open:
            check_options(self._where, keywords, self._known)
        try:
            bound = inspect.Signature(self._parameters).bind(*args, **keywords)
        except TypeError as error:
            raise TypeError(f"{self._where}: {error}") from None
        built = self._options(*args, **keywords)
        if isinstance(built, RunOptions):
            object.__setattr__(built, "_passed", frozenset(bound.arguments))
        return built

    def _listed(self) -> str:
        """The help text of every option, for `help()` and notebooks."""
        listed = fields(cast(Any, self._options)) if hasattr(self._options, "__dataclass_fields__") else ()
        return "\n".join(
            f"{item.name}: {meaning.help}" + (f"; default: {meaning.default}" if meaning.default else "")
            for item in listed
            if (meaning := meaning_of(item))
        )

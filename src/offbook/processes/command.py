"""`Command`: any program, in any language, as a rollout. One process is one rollout."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from offbook.base.child_processes import last_line, last_lines
from offbook.base.errors import ConfigError, RolloutError
from offbook.base.json_files import parse_json
from offbook.base.locked_folders import TemporaryFolder
from offbook.base.options import RunOptions, option, takes
from offbook.base.text import one_line
from offbook.base.types import Trajectory, as_rollout_exception
from offbook.base.user_values import json_value
from offbook.client.model import TrainableModel
from offbook.client.rollouts.capture import completion_limit, forced_temperature, show_calls
from offbook.rewards.reward_result import RewardResult, as_reward
from offbook.scenarios.identity import TEXT_KEYS, scenario_fields, scenario_text
from offbook.trainer.evaluate import Evaluation
from offbook.trainer.options import EvaluateOptions, TrainerOptions, TrainOptions
from offbook.trainer.report import TrainReport
from offbook.trainer.trainer import Trainer

from .environment import (
    REWARD_FILE,
    ProgramGateway,
    gateway_variables,
    held_back_line,
    models_line,
    program_environment,
    scenario_variables,
    write_env_file,
)
from .program import Ending, run_program

logger = logging.getLogger("offbook")

RewardSource = Literal["file", "line", "exit", "none"]
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_CANNOT_RUN = (126, 127)  # exit codes of shells for a program that is not found or cannot be executed
_LARGEST_REWARD_FILE = 2**20  # bytes
_ENDING_SECONDS = 30.0  # above a program's limit: its end, its copy, its calls


@dataclass(frozen=True, kw_only=True)
class CommandOptions(RunOptions):
    """How a program runs as a rollout. Raises ConfigError for an invalid value."""

    heading = "Programs (with --command)"

    reward: RewardSource = option(
        "file",
        "where the program leaves its reward: file ($OFFBOOK_REWARD_FILE), line (`reward: x` on stdout), exit (its "
        "exit code) or none",
    )
    grader: str | None = option(
        None, "program that runs after each rollout and computes the reward; it does not get the agent's keys"
    )
    stdin: str = option(
        "", "text for the program's standard input, such as {prompt} or {scenario}", shown_default="nothing"
    )
    folder: str | None = option(
        None, "folder to copy for each rollout, which runs in the copy", shown_default="the current folder, not copied"
    )
    inside: str | None = option(None, "prefix that runs the program in a sandbox, such as docker run ...")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward not in ("file", "line", "exit", "none"):
            raise ConfigError(f"reward: file, line, exit or none is needed, got {self.reward!r}")
        if self.grader is not None and self.reward == "none":
            raise ConfigError("grader: it gives the reward, so reward='none' leaves nothing for it to do")


@dataclass(frozen=True)
class CommandArguments(CommandOptions):
    """The arguments of a Command."""

    command: str | Sequence[str]
    _: KW_ONLY
    timeout: float | None = option(None, "time limit of the program, in seconds", shown_default="the Trainer's")
    env: Mapping[str, str] | None = option(None, "variables to add to the program's environment")


@dataclass(frozen=True)
class CommandTrainArguments(TrainOptions):
    """The arguments of `Command.train`."""

    scenarios: Iterable[object]
    _: KW_ONLY
    model: TrainableModel | None = option(None, "the model that answers the program's calls")


@dataclass(frozen=True)
class CommandEvaluateArguments(EvaluateOptions):
    """The arguments of `Command.evaluate`."""

    scenarios: Iterable[object]
    _: KW_ONLY
    model: TrainableModel | None = option(None, "the model that answers the program's calls")


class Command:
    """A program as the rollout of a Trainer: `Trainer(model, Command("node agent.js {prompt}"), scenarios)`.

    Each rollout is one process in its own session. Environment variables direct the calls of the usual SDKs and CLIs to
    the server, which records them in the rollout's trajectory. `command` is a list of arguments, or a text that is
    split as a shell splits it;
    no shell runs it. Placeholders work in `command`, `stdin`, `folder`, `inside` and `grader`: `{name}` is that field
    of the scenario, `{text}` the user's message, and `{scenario}` the whole scenario as JSON. `inside` also has
    `{folder}`, `{files}` (the folder of the configuration and the reward file) and `{env_file}`. All processes that the
    program started are stopped when it ends, at `timeout`, and when the trainer ends. The rollout fails if the program
    makes no call, leaves no reward or is stopped. Without `inside` there is no sandbox: the program may do whatever the
    trainer's user may. It does not inherit variables that look like secrets by their names or values, such as `HF_TOKEN`
    or a `DATABASE_URL` with a password: pass those that it needs with `env`.
    """

    @takes(CommandArguments, "Command")
    def __init__(self, options: CommandArguments) -> None:
        self.options = options
        self._argv = words_of(options.command, "command")
        self._inside = words_of(options.inside, "inside") if options.inside is not None else []
        self._grader = words_of(options.grader, "grader") if options.grader is not None else []
        self._warned: set[str] = set()
        if options.timeout is not None and options.timeout <= 0:
            raise ConfigError(f"timeout: seconds above 0 are needed, got {options.timeout!r}")

    def __repr__(self) -> str:
        return f"Command({shlex.join(self._argv)!r})"

    async def __call__(self, model: TrainableModel, scenario: object) -> Trajectory:
        """Run the program once. A failure is the trajectory's `exception`, so that its calls and output are kept."""
        if not isinstance(model, TrainableModel):  # pyright: ignore[reportUnnecessaryIsInstance]  # several, or a Model
            raise ConfigError(f"Command: a program runs with one TrainableModel, got {model!r:.200}")
        api = await model.api()
        trajectory = Trajectory(captured=True)
        gateway = ProgramGateway(api.url, trajectory.id, model.inference_name(), api.key, forced_temperature())
        fields = placeholders(scenario)
        async with self._places(fields) as (folder, files):
            try:
                result = await self._run(trajectory, gateway, fields, folder, files)
            except RolloutError as error:
                trajectory.exception = as_rollout_exception(error)
                result = None
        calls = await show_calls(trajectory, [api])
        self._warn_once("models", models_line(calls, gateway.model))
        if not trajectory.messages_and_choices and trajectory.exception is None:
            trajectory.exception = as_rollout_exception(_no_call(gateway, trajectory))
        if result is not None and trajectory.exception is None:
            trajectory.reward = result.reward
            trajectory.metrics.update(result.metrics)
        return trajectory.finish()

    @takes(CommandTrainArguments, "train")
    def train(self, options: CommandTrainArguments) -> TrainReport:
        """Train on scenarios; see `Trainer.train`. Raises ConfigError, RolloutError."""
        return self._trainer(options, options.scenarios, options.model).train(options.steps)

    @takes(CommandEvaluateArguments, "evaluate")
    def evaluate(self, options: CommandEvaluateArguments) -> Evaluation:
        """Evaluate the newest step on scenarios; see `Trainer.evaluate`. Raises ConfigError, RolloutError."""
        trainer = self._trainer(options, options.scenarios, options.model)
        return trainer.evaluate(temperature=options.temperature, rollouts=options.rollouts, scenarios=options.scenarios)

    def _trainer(self, options: TrainerOptions, scenarios: Iterable[object], model: TrainableModel | None) -> Trainer:
        if model is None:
            raise ConfigError("model: name the model that answers the program's calls, as model=TrainableModel(...)")
        own = self.options.timeout or options.timeout
        arguments: dict[str, Any] = _arguments(self.options) | {"timeout": own}
        limited = Command(**arguments)
        passed: dict[str, Any] = options.passed_to(TrainerOptions) | {"timeout": own + _ENDING_SECONDS}
        return Trainer(model, limited, scenarios, **passed)

    @asynccontextmanager
    async def _places(self, fields: Mapping[str, str]) -> AsyncGenerator[tuple[Path, Path]]:
        """The folder to run in, and a folder for the rollout's own files. Copies are removed at the end."""
        root = TemporaryFolder("rollout")
        try:
            files = root.path / "files"
            files.mkdir()
            if self.options.folder is None:
                yield Path.cwd(), files
                return
            source = Path(filled(self.options.folder, fields, "folder"))
            folder = root.path / "work"
            try:
                await asyncio.to_thread(shutil.copytree, source, folder, symlinks=True)
            except (OSError, shutil.Error) as error:
                raise RolloutError(f"folder: {str(source)!r} could not be copied: {error}") from error
            yield folder, files
        finally:
            await asyncio.to_thread(root.remove)

    async def _run(
        self, trajectory: Trajectory, gateway: ProgramGateway, fields: Mapping[str, str], folder: Path, files: Path
    ) -> RewardResult | None:
        own = scenario_variables(fields["scenario"], files)
        reward_file = files / "reward"
        added = {
            **gateway_variables(gateway, files, os.environ),
            **own,
            REWARD_FILE: str(reward_file),
            **_sampling_variables(),
            **(self.options.env or {}),
        }
        remedy = "name those that it needs with env= or --env"
        self._warn_once("variables", held_back_line(added, os.environ, remedy))
        env_file = write_env_file(files, added)
        places = {"folder": str(folder), "files": str(files), "env_file": str(env_file)}
        argv = [
            *(filled(word, {**fields, **places}, "inside") for word in self._inside),
            *(filled(word, fields, "command") for word in self._argv),
        ]
        stdin = filled(self.options.stdin, fields, "stdin").encode("utf-8", "replace")
        ending = await run_program(
            argv,
            env=program_environment(added, os.environ),
            cwd=folder,
            stdin=stdin,
            timeout=self.options.timeout,
        )
        _keep_output(trajectory, ending, "program")
        trajectory.metadata["exit_code"] = ending.code
        if ending.timed_out:
            raise RolloutError(f"{argv[0]} was stopped after timeout={self.options.timeout} s{_last_words(ending)}")
        if self.options.reward == "none":
            return None
        if not self._grader:
            return _reward(self.options.reward, ending, reward_file, "the program")
        graded = files / "graded"
        graded.unlink(missing_ok=True)  # the program may have written there
        graders = [filled(word, fields, "grader") for word in self._grader]
        environment = os.environ | own | {REWARD_FILE: str(graded)}
        ending = await run_program(graders, env=environment, cwd=folder, timeout=self.options.timeout)
        _keep_output(trajectory, ending, "grader")
        if ending.timed_out:
            raise RolloutError(f"grader: {graders[0]} was stopped after timeout={self.options.timeout} s")
        return _reward(self.options.reward, ending, graded, "the grader")

    def _warn_once(self, about: str, line: str | None) -> None:
        """Log a line that would be much the same for each rollout."""
        if line is not None and about not in self._warned:
            self._warned.add(about)
            logger.warning("%s", line)


def words_of(command: object, option: str) -> list[str]:
    """A command as its arguments. Raises ConfigError for an empty one, and for a text that no shell could split."""
    try:
        words = shlex.split(command) if isinstance(command, str) else list(cast(Sequence[str], command))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{option}: {command!r:.200} cannot be split into arguments: {error}") from error
    if not words or not all(isinstance(word, str) for word in words):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{option}: a program and its arguments are needed, got {command!r:.200}")
    return words


def placeholders(scenario: object) -> dict[str, str]:
    """What `{name}` stands for: the scenario's fields (other values than text as JSON), `scenario`, and `text` if it has one.

    >>> placeholders({"prompt": "fix it", "limit": 3})
    {'prompt': 'fix it', 'limit': '3', 'scenario': '{"prompt": "fix it", "limit": 3}', 'text': 'fix it'}
    """
    fields = scenario_fields(scenario)
    whole = json_value(fields or scenario, "scenario")
    named = {name: value if isinstance(value, str) else json.dumps(value) for name, value in _items(whole)}
    texts = {"text": scenario_text(scenario)} if isinstance(scenario, str) or set(TEXT_KEYS) & set(fields) else {}
    return {**named, "scenario": json.dumps(whole), **texts}


def filled(template: str, fields: Mapping[str, str], option: str) -> str:
    """`template` with each `{name}` replaced; `${name}` stays, for shells. Raises ConfigError for an unknown name.

    >>> filled("fix {file} in ${HOME}", {"file": "a b.py"}, "command")
    'fix a b.py in ${HOME}'
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            known = ", ".join(f"{{{name}}}" for name in fields)
            raise ConfigError(
                f"{option}: {match[0]} in {template!r:.200} is not a field of the scenario; its fields are {known}"
            )
        return fields[match[1]]

    return _PLACEHOLDER.sub(value, template)


def _items(whole: Any) -> Iterable[tuple[str, Any]]:
    return cast(dict[str, Any], whole).items() if isinstance(whole, dict) else ()


def _arguments(options: CommandArguments) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.passed}


def _sampling_variables() -> dict[str, str]:
    """The Trainer's settings for programs that read them. The length of an answer is otherwise as the program asks."""
    values = {"OFFBOOK_TEMPERATURE": forced_temperature(), "OFFBOOK_MAX_COMPLETION_TOKENS": completion_limit()}
    return {name: str(value) for name, value in values.items() if value is not None}


def _reward(source: RewardSource, ending: Ending, file: Path, who: str) -> RewardResult:
    """The reward that a program left. Raises RolloutError if it left none, or none that is finite."""
    if source == "exit":
        if ending.code < 0 or ending.code in _CANNOT_RUN:
            raise RolloutError(f"{who} ended with {ending}, which is not a reward{_last_words(ending)}")
        return RewardResult(float(ending.code == 0))
    if source == "line":
        if ending.stdout.reward is None:
            raise RolloutError(
                f"{who} wrote no line `reward: x` to stdout and ended with {ending}{_last_words(ending)}"
            )
        return as_reward(_number(ending.stdout.reward, f"{who}: `reward:`"), f"{who}: `reward:`")
    if not file.is_file():  # a pipe would be read for ever
        raise RolloutError(
            f"{who} wrote no reward to $OFFBOOK_REWARD_FILE and ended with {ending}{_last_words(ending)}"
        )
    with file.open("rb") as opened:
        text = opened.read(_LARGEST_REWARD_FILE).decode("utf-8", "replace")
    where = f"{who}: $OFFBOOK_REWARD_FILE"
    return as_reward(_number(text, where), where)


def _number(text: str, where: str) -> object:
    try:
        return parse_json(text) if text.lstrip().startswith("{") else float(text)
    except ValueError as error:
        raise RolloutError(
            f"{where} has {one_line(text)!r}; a number, or JSON with the key reward, is needed"
        ) from error


def _keep_output(trajectory: Trajectory, ending: Ending, who: str) -> None:
    for name, output in (("stdout", ending.stdout), ("stderr", ending.stderr)):
        if output.size:
            trajectory.log(f"{name} of the {who}:\n{output.text()}")


def _last_words(ending: Ending) -> str:
    text = ending.stderr.text().strip() or ending.stdout.text().strip()
    end, exception = "\n".join(last_lines(text, 15))[-200:], last_line(text)[:200]
    return f": {one_line(end if exception in end else exception)}" if end else ""


def _no_call(gateway: ProgramGateway, trajectory: Trajectory) -> RolloutError:
    output = f" Its output: {one_line(trajectory.logs[-1][-300:])}" if trajectory.logs else ""
    return RolloutError(
        f"the program made no call that was answered. It must send them to {gateway.root}/v1 ($OPENAI_BASE_URL) or to "
        f"{gateway.root} ($ANTHROPIC_BASE_URL); {gateway.model!r} answers them, whatever model it names.{output}"
    )

"""The command `offbook wrap`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from offbook.base.errors import ConfigError, RolloutError
from offbook.base.locked_folders import TemporaryFolder
from offbook.base.server_options import DEFAULT_NAME
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.types import Call, RolloutPlace, Trajectory, as_rollout_exception
from offbook.client.connection.http import Api
from offbook.client.local import server_at
from offbook.client.rollouts.capture import recorded_calls
from offbook.client.rollouts.records import rollout_records
from offbook.processes.command import filled, words_of
from offbook.processes.environment import (
    ProgramGateway,
    gateway_variables,
    held_back_line,
    models_line,
    passed_variables,
    program_environment,
    write_env_file,
)
from offbook.processes.program import Ending, run_program

from .help_pages import more_option
from .options import Dir, Env, Server

Words = Annotated[list[str], typer.Argument(help="the program and its arguments, after --", metavar="-- PROGRAM ...")]


def wrap(
    words: Words,
    model: Annotated[
        str | None, typer.Option(help="model that answers, as MODEL or MODEL@STEP  [default: the only model]")
    ] = None,
    timeout: Annotated[
        float | None, more_option(help="stop the program after this many seconds  [default: no limit]")
    ] = None,
    inside: Annotated[
        str | None, more_option("--in", help="prefix that runs the program in a sandbox, such as 'docker run ...'")
    ] = None,
    env: Env = [],  # noqa: B006
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Run a program once and record its model calls.

    A server must be running. Environment variables direct the usual SDKs and CLIs to it.

    \b
    Example:
      offbook wrap -- python agent.py
    """
    if timeout is not None and timeout <= 0:
        raise ConfigError(f"--timeout: seconds above 0 are needed, got {timeout!r}")
    api = server_at(url, dir)
    if api is None:
        raise ConfigError(
            "no server is running here to record the calls: start one with `offbook serve`, or name one with --url"
        )
    prefix = words_of(inside, "--in") if inside is not None else []
    program = _Program(prefix, words, passed_variables(env, os.environ), timeout)
    raise typer.Exit(asyncio.run(_wrapped(api, model, program)))


@dataclass(frozen=True)
class _Program:
    prefix: list[str]
    words: list[str]
    passed: dict[str, str] = field(repr=False)
    timeout: float | None


async def _wrapped(api: Api, named: str | None, program: _Program) -> int:
    """Run the program and say what was recorded. Returns its exit code; 124 if it was stopped, 128 + n for signal n."""
    model = await _model(api, named)
    trajectory = Trajectory(captured=True)
    gateway = ProgramGateway(api.url, trajectory.id, model, api.key)
    try:
        ending = await _run(gateway, program)
    except BaseException as error:
        trajectory.exception = as_rollout_exception(error)
        await asyncio.shield(_finished(api, trajectory, model))
        raise
    if ending.timed_out:
        trajectory.exception = as_rollout_exception(RolloutError(f"stopped after --timeout {program.timeout}"))
    calls = await _finished(api, trajectory, model)
    outcome = f"stopped after {program.timeout} s" if ending.timed_out else str(ending)
    echo(
        f"offbook: {outcome}; recorded {counted(len(calls), 'call')} of {model} in trajectory {trajectory.id}", err=True
    )
    if line := models_line(calls, model):
        echo(f"offbook: {line}", err=True)
    if not calls:
        echo(
            f"offbook: the program must send its calls to {gateway.root}/v1 ($OPENAI_BASE_URL) or to {gateway.root} "
            f"($ANTHROPIC_BASE_URL); {model} answers them, whatever model it names",
            err=True,
        )
    if ending.timed_out:
        return 124
    return ending.code if ending.code >= 0 else 128 - ending.code


async def _run(gateway: ProgramGateway, program: _Program) -> Ending:
    with TemporaryFolder("wrap") as files:
        added = gateway_variables(gateway, files, os.environ) | program.passed
        if line := held_back_line(added, os.environ, "name those that it needs with --env"):
            echo(f"offbook: {line}", err=True)
        env_file = write_env_file(files, added)
        places = {"folder": str(Path.cwd()), "files": str(files), "env_file": str(env_file)}
        argv = [*(filled(word, places, "--in") for word in program.prefix), *program.words]
        environment = program_environment(added, os.environ)
        return await run_program(argv, env=environment, stdin=None, timeout=program.timeout, captured=False)


async def _finished(api: Api, trajectory: Trajectory, model: str) -> tuple[Call, ...]:
    """Finish the trajectory, so that lists show it as a whole. Returns its recorded calls."""
    calls = await recorded_calls(api, trajectory.id)
    if calls:
        await api.finish(rollout_records([trajectory.finish()], model, RolloutPlace()))
    return calls


async def _model(api: Api, named: str | None) -> str:
    """The model that answers; if none is named, the only one beside the default one. Raises ServerError for an unknown one,
    and ConfigError where none is named and there are several."""
    if named is None:
        names = [model.name for model in await api.models()]
        names = [name for name in names if name != DEFAULT_NAME] or names
        if len(names) != 1:
            raise ConfigError(f"several models are registered ({', '.join(names)}): name one of them with --model")
        return names[0]
    await api.model(named.partition("@")[0])
    return named

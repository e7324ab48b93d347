"""The embedded inference engine, a process with vLLM's HTTP API.

Run it with `python -m offbook.engine.inference.embedded --model DIR ...`. Exit codes: 0 regular end, 1 the sampling
thread died, 2 invalid option or model, 3 the address is in use.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import uvicorn

from offbook.base.errors import ConfigError, OffbookError

from ..protocol import sampler_parser
from ..quick_imports import leave_with, quick_imports

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger("offbook.sampler")
_PARENT_CHECK = 0.5  # seconds


def main(argv: list[str] | None = None) -> int:
    """Load the model, serve it until the process is stopped, and return the exit code."""
    parser = sampler_parser("offbook-sampler", "The embedded inference engine.")
    parser.add_argument("--max-batch", type=int, default=64, help="calls decoded together")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.parent_pid is not None:
        _exit_with(options.parent_pid)
    try:
        listener = _bound(options)
    except OSError as error:
        place = options.uds or f"--host {options.host} --port {options.port}"
        logger.error("cannot listen on %s: %s; choose another port", place, error)
        return 3
    try:
        with quick_imports(options.model):
            app = _app(options)
    except OffbookError as error:
        listener.close()
        logger.error("%s", error)
        return 2
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=3, lifespan="on")
    place = options.uds or "http://{}:{}".format(*listener.getsockname()[:2])
    logger.info("serving %s on %s", options.served_model_name, place)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _app(options: argparse.Namespace) -> FastAPI:
    import torch
    from transformers.utils import logging as transformers_logging

    from .app import build_app
    from .chat.families import thinks
    from .chat.tool_calls import format_of
    from .decoding.model import load_model
    from .service import SamplingService

    transformers_logging.disable_progress_bar()
    if options.threads is not None:
        if options.threads < 1:
            raise ConfigError(f"--threads must be at least 1 (got {options.threads})")
        torch.set_num_threads(options.threads)
    if options.max_batch < 1:
        raise ConfigError(f"--max-batch must be at least 1 (got {options.max_batch})")
    runner = load_model(options.model, device=options.device, dtype=options.dtype, max_model_len=options.max_model_len)
    difference = runner.probe()
    logger.info("probe: logits differ from a plain forward pass by at most %.3g", difference)
    service = SamplingService(
        runner,
        name=options.served_model_name,
        max_batch=options.max_batch,
        calls=format_of(options.model),
        thinks=thinks(options.model),
        prompt_date=options.prompt_date,
        on_death=lambda: os._exit(1),  # the parent process restarts it
    )
    return build_app(service)


def _bound(options: argparse.Namespace) -> socket.socket:
    """A socket bound to the address. Called before the model is loaded, so that a port in use fails at once."""
    if options.uds is not None:
        family, address = socket.AF_UNIX, options.uds
    else:
        family, address = socket.AF_INET6 if ":" in options.host else socket.AF_INET, (options.host, options.port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _exit_with(pid: int) -> None:
    try:
        parent = psutil.Process(pid)
    except psutil.NoSuchProcess:
        logger.error("--parent-pid %d is not a running process: exiting", pid)
        os._exit(0)

    def watch() -> None:
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_PARENT_CHECK)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    leave_with(main)

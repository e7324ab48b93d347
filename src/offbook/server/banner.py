"""The messages that the server prints when it is ready, and when it has ended."""

from __future__ import annotations

from .http.auth import Key
from .services import Services


def ready(services: Services, url: str, key: Key | None, dashboard: str) -> str:
    """The message of a ready server: its model, engine, files and addresses, and a line of client code.

    `dashboard` is the dashboard's address. On a server with a key it is a link that signs one browser in.
    """
    options = services.options
    rows = [
        ("base model", f"{services.base.name} ({services.base.path})"),
        ("engine", services.engine.described()),
        ("directory", str(options.dir)),
        ("models", _steps(services)),
        ("logs", str(options.dir / "logs")),
        ("training", "off (--inference-only)" if services.learner is None else "on"),
    ]
    if key is not None and key.kept is not None:
        shown = f"{key.text} (shown once; stored in {key.kept})" if key.is_new else f"stored in {key.kept}"
        rows.append(("key", shown))
    elif key is not None:
        rows.append(("key", "the configured one"))
    once = " (signs one browser in, within 15 minutes)" if key is not None else ""
    rows.append(("dashboard", dashboard + once))
    lines = [f"Offbook is ready at {url}", *(f"  {name:<11}{value}" for name, value in rows)]
    return "\n".join([*lines, *_client(url, key)])


def _client(url: str, key: Key | None) -> list[str]:
    if key is None:
        return [f'  {"client":<11}offbook.RemoteBackend("{url}"), or any OpenAI client with base_url="{url}/v1"']
    text = key.text if key.is_new else "..."
    return [f'  {"client":<11}offbook.RemoteBackend("{url}", api_key="{text}")']


def ended(services: Services) -> str:
    """The message after shutdown: the newest checkpoint of every trained model."""
    states = [model.state() for model in services.models.registry.models()]
    trained = [f"  {state.name}: step {state.step}, {state.checkpoint}" for state in states if state.checkpoint]
    return "\n".join(["Ended. Everything recorded and trained is saved.", *trained])


def _steps(services: Services) -> str:
    return ", ".join(f"{model.facts.name} (step {model.step})" for model in services.models.registry.models())

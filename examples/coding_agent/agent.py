"""A coding agent in a shell, of the standard library alone: `python agent.py "what to do"`, in the repository's folder.

It speaks to the chat completions API that OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name."""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

PROMPT = "You mend the repository in the current folder. Run its tests, change its files, and say when the tests pass."
TURNS = 12
LONGEST_OUTPUT = 4_000  # characters of a command's output that the model reads
TOOLS = {
    "run_tests": ("Run the tests of a module.", "module", lambda module: ["./run_tests", module]),
    "bash": ("Run a command in bash.", "command", lambda command: ["bash", "-c", command]),
}


def main(task: str) -> None:
    """Answer with calls of tools until an answer has none."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": PROMPT}, {"role": "user", "content": task}]
    for _ in range(TURNS):
        answer = asked(messages)
        messages.append(answer)
        for call in answer.get("tool_calls") or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": ran(call["function"])})
        if not answer.get("tool_calls"):
            print(answer["content"])
            return


def asked(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [declared(name) for name in TOOLS]}
    body["max_tokens"] = int(os.environ.get("MAX_TOKENS", "1024"))
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)["choices"][0]["message"]


def declared(name: str) -> dict[str, Any]:
    """A tool, as the API wants it."""
    text, argument, _ = TOOLS[name]
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


def ran(function: dict[str, str]) -> str:
    """What a tool says; a call that is no call is told so."""
    try:
        _, argument, words = TOOLS[function["name"]]
        command = words(str(json.loads(function["arguments"])[argument]))
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (KeyError, TypeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr)[-LONGEST_OUTPUT:] or f"exit code {done.returncode}"


if __name__ == "__main__":
    main(sys.argv[1])

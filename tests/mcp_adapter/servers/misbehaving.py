"""A small MCP server over stdio, in plain JSON-RPC, that goes wrong as argv says: `misbehaving.py MODE`.

It speaks the protocol of 2025-06-18. Its tools: `echo(text)`, and `goad()`, which does what the mode is for.
"""

import json
import os
import signal
import subprocess
import sys
import time

MODE = sys.argv[1] if len(sys.argv) > 1 else "well"
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
ECHO = {"name": "echo", "description": "Returns the text.", "inputSchema": TEXT, "annotations": {"readOnlyHint": True}}
GOAD = {"name": "goad", "description": "Misbehaves.", "inputSchema": {"type": "object"}}
MEGABYTE = "x" * 1_000_000
changed = False


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def answer(request, result):
    send({"id": request["id"], "result": result})


def say(request, text, **more):
    answer(request, {"content": [{"type": "text", "text": text}], **more})


def fail(request, code, message):
    send({"id": request["id"], "error": {"code": code, "message": message}})


def tools():
    if MODE == "bad-schema":
        return [ECHO, {"name": "typeless", "inputSchema": {}}, {"name": "listed", "inputSchema": []}, GOAD]
    if MODE == "stuck":
        return [{**GOAD, "annotations": {"readOnlyHint": True}}, ECHO]
    if not changed:
        return [ECHO, GOAD]
    return [{**ECHO, "description": "Returns something else."}, {"name": "new", "inputSchema": {"type": "object"}}]


def write(text):
    sys.stdout.write(text)
    sys.stdout.flush()


def forever(do):
    while True:
        do()


def die(request):
    print("the tool has failed badly", file=sys.stderr, flush=True)
    os._exit(3)


def flood_endless_line(request):
    write('{"jsonrpc": "2.0", "id": 1, "result": "')
    forever(lambda: write(MEGABYTE))


def flood_stderr(request):
    for _ in range(50):
        sys.stderr.write(MEGABYTE)
    say(request, "quiet again")


NOTE = {"method": "notifications/message", "params": {"level": "info", "data": "x" * 200}}
GOADED = {
    "die": die,
    "hang": lambda request: None,
    "stuck": lambda request: time.sleep(1_000),
    "garbled": lambda request: write('{"jsonrpc": "2.0", "id": ' + str(request["id"]) + ', "result": {"content": [\n'),
    "shapeless": lambda request: answer(request, {"content": "a text"}),
    "flood-answer": lambda request: say(request, MEGABYTE * 50),
    "flood-endless-line": flood_endless_line,
    "flood-notifications": lambda request: forever(lambda: send(NOTE)),
    "flood-noise": lambda request: forever(lambda: print("not a message " * 10)),
    "flood-stderr": flood_stderr,
    "own-error": lambda request: fail(request, -32000, "no such row"),
    "own-timeout": lambda request: fail(request, -32001, "the database timed out"),
    "escapes": lambda request: say(request, "\x1b[2Jgone\x07"),
    "arguments": lambda request: say(request, json.dumps(sys.argv)),
    "environment": lambda request: say(request, json.dumps(dict(os.environ))),
}


def handle(request):
    method = request["method"]
    if method == "initialize":
        send({"method": "notifications/message", "params": {"level": "info", "data": "hello"}})
        info = {"name": "misbehaving", "version": "1"}
        capabilities = {"tools": {"listChanged": True}}
        answer(request, {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info})
    elif method == "tools/list":
        answer(request, {"tools": tools()})
    elif method == "tools/call" and request["params"]["name"] == "goad" and not changed:
        GOADED.get(MODE, lambda request: say(request, "well"))(request)
    elif method == "tools/call" and request["params"]["name"] == "echo":
        say(request, request["params"].get("arguments", {}).get("text", ""))
    elif "id" in request:
        send({"id": request["id"], "error": {"code": -32601, "message": f"no {method}"}})


def main():
    if MODE == "silent":
        time.sleep(1_000)
    if MODE == "exit":
        print("no licence \x1b[31mfound\x1b[0m", file=sys.stderr, flush=True)
        sys.exit(4)
    if MODE == "chatty":
        print("Listening on stdio ...", flush=True)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = subprocess.Popen(["sleep", "1000"])
        print(f"grandchild {grandchild.pid}", file=sys.stderr, flush=True)
    for line in sys.stdin:
        handle(json.loads(line))
    while MODE == "stubborn":
        time.sleep(1)


main()

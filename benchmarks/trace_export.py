"""How long trace sinks take in the background: `python benchmarks/trace_export.py [--rollouts 1280]`.

Exports sample rollouts of two model calls each to a collector on this machine, and prints wall and CPU seconds of this process
without the collector, which runs in another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from understudy.contracts import GroupsFinished
from understudy.tracing.conformance import sample_rollout
from understudy.tracing.fanout import show
from understudy_langfuse import LangfuseConnection, LangfuseSink

COLLECTOR = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version, wbufsize = "HTTP/1.1", 65536
    def log_message(self, *_): pass
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        scores = self.path.endswith("ingestion")
        answer = b'{"successes": [], "errors": []}' if scores else b""
        self.send_response(207 if scores else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
GROUPS_OF = 64
"""Rollouts of one event."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1280)
    count = parser.parse_args().rollouts
    rollouts = [sample_rollout(index) for index in range(count)]
    collector = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    try:
        assert collector.stdout is not None
        url = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
        sink = LangfuseSink(LangfuseConnection(url, "pk", "sk"))
        wall, cpu = time.perf_counter(), time.process_time()
        for start in range(0, count, GROUPS_OF):
            show(
                sink, GroupsFinished("benchmark", "train", 0, (str(start),), tuple(rollouts[start : start + GROUPS_OF]))
            )
        sink.closed()
        seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    finally:
        collector.kill()
        collector.wait()
    print(json.dumps({"rollouts": count, **{name: round(value, 2) for name, value in seconds.items()}}))


if __name__ == "__main__":
    main()

"""The watching process: reads `+GROUP` and `-GROUP` lines, and kills the remaining groups when process argv[1] has ended."""

import os
import select
import signal
import sys


def main(parent: int) -> None:
    """Watch until `parent` ends or closes stdin, then kill the remaining process groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        chunk = os.read(0, 65_536)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]))

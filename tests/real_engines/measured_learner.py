"""The learner's own process, on a device whose memory reads as that of an 80 GiB GPU: python -m tests.real_engines.measured_learner."""

from __future__ import annotations

import sys

from offbook.engine.learner import peak_memory
from offbook.engine.learner.__main__ import main
from offbook.engine.learner.peak_memory import MemoryReading

READING = MemoryReading(peak=3 * 2**30, held_peak=4 * 2**30, held=2**30, free=76 * 2**30, total=80 * 2**30)

if __name__ == "__main__":
    peak_memory.read = lambda device: READING
    sys.exit(main())

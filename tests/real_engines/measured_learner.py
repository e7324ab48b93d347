"""The learner's own process, on a device whose memory reads as that of an 80 GiB GPU: python -m tests.real_engines.measured_learner."""

from __future__ import annotations

import sys

from offbook.engine.learner import learner
from offbook.engine.learner.__main__ import main

if __name__ == "__main__":
    learner.memory_metrics = lambda device: {
        "memory/learner_peak": 3.0,
        "memory/learner_held": 4.0,
        "memory/gpu_peak": 7.0,
    }
    sys.exit(main())

"""The server, whose learner is the one of measured_learner.py: python -m tests.real_engines.measured_server."""

from __future__ import annotations

import sys

from offbook.server.__main__ import main
from offbook.server.training import learner_client

if __name__ == "__main__":
    learner_client.LEARNER_MODULE = "tests.real_engines.measured_learner"
    sys.exit(main())

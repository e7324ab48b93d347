"""`python -m offbook`: the command line."""

import sys

from .commands.main import main

if __name__ == "__main__":
    sys.exit(main())

"""The reward: 1 if the module in the current folder passes its tests, from here and not from the agent's copy."""

import os
import subprocess
import sys

from tasks import BUGS, test_code

[bug] = [bug for bug in BUGS if bug.module == sys.argv[1]]
code = f"import sys; sys.path.insert(0, '.')\n{test_code(bug)}"
done = subprocess.run([sys.executable, "-I", "-B", "-c", code], timeout=60, capture_output=True, text=True)
print(done.stderr[-500:])
with open(os.environ["OFFBOOK_REWARD_FILE"], "w") as file:
    file.write(str(float(done.returncode == 0)))

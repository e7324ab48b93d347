"""A server whose sampler gets another adapter than the learner wrote: python -m tests.server.misapplying_server, with
twice its scale."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from offbook.server.__main__ import main
from offbook.server.sampler import supervised
from offbook.server.sampler.supervised import LoadedAdapters


class Misapplying(LoadedAdapters):
    async def load(self, adapter: str, folder: Path) -> None:
        copy = folder.with_name("planted")
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        config = copy / "adapter_config.json"
        values = json.loads(config.read_text("utf-8"))
        config.write_text(json.dumps(values | {"lora_alpha": 2 * values["lora_alpha"]}), "utf-8")
        await super().load(adapter, copy)


if __name__ == "__main__":
    supervised.LoadedAdapters = Misapplying
    sys.exit(main())

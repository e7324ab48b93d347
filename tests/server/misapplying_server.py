"""A server whose sampler gets another adapter than the learner wrote: python -m tests.server.misapplying_server. With vLLM
no module of the base has its names, as if the learner had loaded another class; with the embedded engine, which refuses
that, it has twice its scale."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

from offbook.server.__main__ import main
from offbook.server.sampler import supervised
from offbook.server.sampler.supervised import LoadedAdapters


class Misapplying(LoadedAdapters):
    async def load(self, adapter: str, folder: Path) -> None:
        copy = folder.with_name("planted")
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        config, weights = copy / "adapter_config.json", copy / "adapter_model.safetensors"
        if "vllm" not in sys.argv:
            values = json.loads(config.read_text("utf-8"))
            config.write_text(json.dumps(values | {"lora_alpha": 2 * values["lora_alpha"]}), "utf-8")
        else:
            tensors = load_file(weights)
            save_file({name.replace(".layers.", ".text.layers."): value for name, value in tensors.items()}, weights)
        await super().load(adapter, copy)


if __name__ == "__main__":
    supervised.LoadedAdapters = Misapplying
    sys.exit(main())

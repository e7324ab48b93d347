"""Write unsloth_signatures.json: the names in Unsloth's attention that trees rely on, in the version that GPUs get.

That version does not import without a GPU, so its source is read. After another pin in pyproject.toml:

    pip download --no-deps --dest wheel unsloth==VERSION && unzip -q wheel/unsloth-*.whl -d wheel
    python tests/engine/learner/make_unsloth_signatures.py VERSION wheel

Then run `python -m tests.engine.learner.unsloth_forwards OUTPUT.json wheel`: the same version's forward passes on a CPU.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("unsloth_signatures.json")
FAMILIES = ("llama", "mistral", "qwen3")  # Qwen2's and Gemma's attention is Llama's


def fields(tree: ast.Module, name: str) -> list[str]:
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return sorted(
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


def parameters(tree: ast.Module, name: str) -> list[str]:
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    arguments = found.args
    return sorted(one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def calls(tree: ast.Module, forward: str) -> dict[str, list[str]]:
    """Keywords with which a family's attention builds the context and calls `run_attention`."""
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == forward)
    return {
        node.func.id: sorted(keyword.arg for keyword in node.keywords if keyword.arg)
        for node in ast.walk(found)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("run_attention", "AttentionContext")
    }


def main(version: str, folder: Path) -> None:
    dispatch = ast.parse((folder / "unsloth/utils/attention_dispatch.py").read_text("utf-8"))
    families = {
        family: calls(
            ast.parse((folder / f"unsloth/models/{family}.py").read_text("utf-8")),
            f"{family.capitalize()}Attention_fast_forward",
        )
        for family in FAMILIES
    }
    found = {
        "version": version,
        "parameters": parameters(dispatch, "run_attention"),
        "config": fields(dispatch, "AttentionConfig"),
        "context": fields(dispatch, "AttentionContext"),
        "families": families,
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Writes fused_adam_contract.json: what Transformer Engine's FusedAdam takes and does.

    python tests/references/make_fused_adam_contract.py WHEEL

The wheel is transformer_engine-2.20.2-py3-none-any.whl of PyPI. Facts are read off the syntax tree;
nothing is run. Only names, defaults and messages are kept.
"""

import ast
import json
import pathlib
import sys
import zipfile
from typing import Any

TE_PATH = "transformer_engine/pytorch/optimizers/fused_adam.py"


def text_of(node: ast.expr) -> str:
    """Return the constant parts of a message."""
    return "".join(
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def facts_of(source: str) -> dict[str, Any]:
    """Return what the class FusedAdam of a file takes, keeps and refuses."""
    tree = ast.parse(source)
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "FusedAdam")
    methods = {n.name: n for n in cls.body if isinstance(n, ast.FunctionDef)}
    init, step = methods["__init__"], methods["step"]
    named = [arg.arg for arg in (*init.args.args, *init.args.kwonlyargs)][1:]
    values = [*init.args.defaults, *(d for d in init.args.kw_defaults if d is not None)]
    defaults = dict(zip(named[len(named) - len(values) :], map(ast.unparse, values), strict=True))
    stores = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    raises = [
        text_of(node.exc)
        for node in ast.walk(init)
        if isinstance(node, ast.Raise) and node.exc is not None
    ]
    asked = {
        node.attr
        for node in ast.walk(step)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "grad_scaler"
    }
    return {
        "constructor": named,
        "defaults": defaults,
        "step": [arg.arg for arg in step.args.args][1:],
        "attributes": sorted(stores),
        "refusals": raises,
        "asks_grad_scaler_for": sorted(asked),
        "checks_dtensor_states": "DTensor Disparity" in source,
    }


def main() -> None:
    (wheel,) = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(TE_PATH).decode()
    source = f"{pathlib.Path(wheel).name} of PyPI, {TE_PATH}"
    found = {"version": [2, 20], "source": source, **facts_of(text)}
    target = pathlib.Path(__file__).with_name("fused_adam_contract.json")
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The verl that Python would import: where it is, its version and the keys of its configuration."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import PatchError

COMPOSED = ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml")
"""verl's whole configurations, composed."""
OF_ALL_ENGINES = (*COMPOSED, "_generated_ppo_torchtitan_trainer.yaml", "_generated_ppo_veomni_trainer.yaml")
FOLDER = Path("verl/trainer/config")


def find_verl_root() -> Path:
    """Return the folder that contains the package which `import verl` would load.

    Raises PatchError if verl is not importable.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise PatchError("verl is not importable here; run `bash run_scripts/setup.sh`, or pass --verl-dir")
    return Path(spec.origin).resolve().parent.parent


def version_in(root: Path) -> str | None:
    """Return the version of the verl at `root`, or None if it has no version file."""
    file = root / "verl" / "version" / "version"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def keys_of_tree(root: Path, names: Iterable[str] = COMPOSED) -> dict[str, Mapping[str, Any]]:
    """Return verl's composed configurations by the names of their files; empty if there are none."""
    import yaml

    # The loader in Python takes half a second for a file.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = [root / FOLDER / name for name in names]
    return {file.name: yaml.load(file.read_bytes(), Loader=loader) for file in files if file.is_file()}


def has(tree: Mapping[str, Any], path: str) -> bool:
    """Return whether a configuration has a key at `path`."""
    node: Any = tree
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True

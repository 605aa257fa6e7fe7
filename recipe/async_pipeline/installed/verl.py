# SPDX-License-Identifier: Apache-2.0
"""The verl that Python would import: where it is, its version, its keys, and whether it is patched.

`patches/state.json` has the ids of the files that the patches touch, by version of verl and by file. They are
git's, of blobs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import PatchedVerlRequired, PatchError

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


FILE = "state.json"
NULL_ID = "0" * 40
"""The blob id that git writes for a file that does not exist."""
State = Literal["pristine", "applied", "diverged"]


class FileIds(NamedTuple):
    """The ids of a file before the first patch that touches it, and after the last one."""

    pristine: str
    applied: str

    def state_of(self, content: bytes | None) -> State:
        """Return the state of a file with this content; None if there is no file."""
        actual = NULL_ID if content is None else blob_id(content)
        states: dict[str, State] = {self.pristine: "pristine", self.applied: "applied"}
        return states.get(actual, "diverged")


def blob_id(content: bytes) -> str:
    """Return git's blob id of a file with this content (40 hex digits)."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def read_or_none(file: Path) -> bytes | None:
    """Return the contents of a file, or None if there is no such file."""
    return file.read_bytes() if file.is_file() else None


def patches_dir() -> Path:
    """Return the folder of patches and of records of what is tested: the checkout's, or the installation's.

    Raises PatchError if neither exists.
    """
    candidates = [
        Path(__file__).resolve().parents[3] / "patches",
        *(Path(sysconfig.get_path("data", scheme)) / "share/async_pipeline/patches" for scheme in _schemes()),
    ]

    for candidate in candidates:
        if (candidate / "PIN").is_file():
            return candidate
    raise PatchError(
        f"no patches folder; looked in {', '.join(map(str, candidates))}; reinstall async_pipeline"
    )


def _schemes() -> tuple[str, str]:
    return sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")


def ids_for(root: Path, folder: Path | None = None) -> Mapping[str, FileIds]:
    """Return the ids for the version of the verl at `root`, or else for the pinned one, by file.

    Raises PatchError if `state.json` in `folder` (default: `patches_dir`) is missing or has another form.
    """
    file = (folder or patches_dir()) / FILE
    try:
        versions = json.loads(file.read_text(encoding="utf-8"))
        of_version = versions.get(version_in(root)) or next(iter(versions.values()))
        return {path: FileIds(**ids) for path, ids in of_version.items()}
    except (OSError, ValueError, TypeError, AttributeError, StopIteration) as error:
        raise PatchError(
            f"{file} is not a record of patched files ({type(error).__name__}: {error}); reinstall "
            "async_pipeline, or run `bash run_scripts/fix.sh` in a checkout"
        ) from None


def require_patched(root: Path, ids: Mapping[str, FileIds] | None = None) -> None:
    """Raise PatchedVerlRequired unless the verl at `root` is the pinned one with the patches applied."""
    for path, state in _states(root, ids):
        if state != "applied":
            raise PatchedVerlRequired(
                f"{root / path} is {state}; run `async-pipeline patch apply`, then retry"
            )


def require_known(root: Path, ids: Mapping[str, FileIds] | None = None) -> None:
    """Raise PatchedVerlRequired if a file that patches touch is neither as published nor as patched."""
    for path, state in _states(root, ids):
        if state == "diverged":
            raise PatchedVerlRequired(
                f"{root / path} is diverged; restore the published file, or run `async-pipeline patch fetch "
                "--fresh`, then retry"
            )


def _states(root: Path, ids: Mapping[str, FileIds] | None) -> list[tuple[str, State]]:
    ids = ids_for(root) if ids is None else ids
    return [(path, one.state_of(read_or_none(root / path))) for path, one in ids.items()]

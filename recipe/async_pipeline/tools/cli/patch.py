# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline patch`: manage the pinned verl tree and the series of patches on it."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

from recipe.async_pipeline.console import EXIT_OK, echo
from recipe.async_pipeline.installed import verl as installed_verl
from recipe.async_pipeline.tools.patches import patched_tree, series, verl_source
from recipe.async_pipeline.tools.patches.refresh import refresh

HELP = {
    "fetch": "download the pinned verl to .cache/verl and check its hash, or link a clone (--verl-dir)",
    "status": "print whether each touched file is pristine, applied or diverged",
    "apply": "apply the series; changes nothing if it is applied already or a file is diverged",
    "revert": "revert the series, byte for byte",
    "refresh": "rewrite the diffs of PATCH from the edited tree and keep its header",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in HELP.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--verl-dir",
            type=Path,
            metavar="DIR",
            help="the folder that contains verl/ (default: "
            + ("download the release)" if name == "fetch" else "the fetched tree, else the importable verl)"),
        )
        action.add_argument("--json", action="store_true", help="print one JSON object")

        if name == "fetch":
            action.add_argument(
                "--fresh", action="store_true", help="replace an existing tree, including any edits"
            )
        if name == "refresh":
            action.add_argument("patch", metavar="PATCH", help="a file name in patches/")
            action.add_argument("paths", nargs="*", metavar="PATH", help="files to add to the patch")


def run(args: argparse.Namespace) -> int:
    """Run the action and print its result. Raises PatchError as the functions of `tools/patches` do."""
    folder = installed_verl.patches_dir()
    result = _fetch(args, folder) if args.action == "fetch" else _on_tree(args, folder)
    echo(json.dumps(result, indent=2) if args.json else _as_text(result))
    return EXIT_OK


def _fetch(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if args.verl_dir is None:
        root = verl_source.fetch(folder, fresh=args.fresh)
    else:
        root = verl_source.adopt(folder, args.verl_dir, fresh=args.fresh)
    return _report("fetch", root, folder, changed=())


def _on_tree(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    root: Path = args.verl_dir or verl_source.default_verl_root(folder)
    patches, folder = folder, verl_source.series_folder(root, folder)
    verl_source.check_version(root, verl_source.read_pin(folder))
    changed: tuple[str, ...] = ()
    if args.action == "apply":
        changed = patched_tree.apply(root, folder=folder)
    elif args.action == "revert":
        changed = patched_tree.revert(root, folder=folder)
    elif args.action == "refresh":
        pristine = functools.partial(verl_source.published_file, folder)
        rewritten = refresh(args.patch, root, pristine=pristine, add=args.paths, folder=folder)
        if rewritten:
            series.record_ids(patches)
            changed = (f"patches/{args.patch}", f"patches/{installed_verl.FILE}")
    return _report(args.action, root, folder, changed=changed)


def _report(action: str, root: Path, folder: Path, *, changed: tuple[str, ...]) -> dict[str, Any]:
    state = patched_tree.patch_state(root, folder=folder)
    return {
        "action": action,
        "verl_root": str(root),
        "overall": state.overall,
        "changed": list(changed),
        "files": [{"path": f.path, "state": f.state, "patches": list(f.patches)} for f in state.files],
    }


def _as_text(result: dict[str, Any]) -> str:
    lines = [f"{result['verl_root']}: {result['overall']}"]
    if result["action"] == "status":
        lines += [f"  {f['state']:<9} {f['path']}  ({', '.join(f['patches'])})" for f in result["files"]]
    elif result["action"] != "fetch":
        lines += [f"  changed {path}" for path in result["changed"]] or ["  nothing to do"]
    return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""Read, apply and write the diffs of `patches/`, in bytes. `git apply` changes the files.

Narrower than git: both ends of a change are checked against the blob ids in the `index` line, so a diff
applies to exactly the file that it was made for. Renames, deletions and binary files are refused.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import NULL_ID, blob_id

_DIFF = re.compile(rb"diff --git a/(?P<old>\S+) b/(?P<new>\S+)")
_INDEX = re.compile(rb"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40})( 100(644|755))?")


@dataclass(frozen=True, kw_only=True)
class FileDiff:
    """The change that one patch makes to one file, and the blob ids before and after."""

    path: str
    """Relative to the root of the verl tree, with forward slashes."""
    old_id: str
    new_id: str
    text: bytes
    """The diff itself, from its line `diff --git`."""

    @property
    def creates(self) -> bool:
        """Whether the file does not exist before the patch."""
        return self.old_id == NULL_ID

    def apply(self, content: bytes) -> bytes:
        """Return the file after the patch. Raises PatchError if the content or the result is unexpected."""
        self._check(content, self.old_id, "before")
        result = git_apply(self, content)
        self._check(result, self.new_id, "after")
        return result

    def revert(self, content: bytes) -> bytes:
        """Return the file before the patch (empty if the patch creates it). Raises as `apply`."""
        self._check(content, self.new_id, "before reverting")
        result = git_apply(self, content, reverse=True)
        self._check(result, self.old_id, "after reverting")
        return result

    def _check(self, content: bytes, expected: str, moment: str) -> None:
        actual = NULL_ID if expected == NULL_ID and not content else blob_id(content)
        if actual != expected:
            raise PatchError(f"{self.path} has blob id {actual} {moment}, the patch expects {expected}")


def git_apply(diff: FileDiff, content: bytes, *, reverse: bool = False) -> bytes:
    """Return what `git apply` makes of the content (empty if a diff creates it), at other lines if it must.

    Raises PatchError if git refuses, or is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="async_pipeline-patch-") as folder:
        file = Path(folder, diff.path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if content or not diff.creates:
            file.write_bytes(content)
        # Inside another repository, git would change nothing and report success. Settings of the user could
        # change line ends.
        alone = {"GIT_CEILING_DIRECTORIES": str(Path(folder).parent), "GIT_CONFIG_NOSYSTEM": "1"}
        alone["GIT_CONFIG_GLOBAL"] = os.devnull
        command = ["git", "apply", "--whitespace=nowarn", *(["--reverse"] if reverse else []), "-"]
        try:
            done = subprocess.run(
                command, input=diff.text, cwd=folder, env={**os.environ, **alone}, capture_output=True
            )
        except FileNotFoundError as error:
            raise PatchError("git is not installed, and patches are applied with it; install git") from error
        if done.returncode:
            raise PatchError(f"{diff.path}: {done.stderr.decode(errors='replace').strip()}")
        return file.read_bytes() if file.is_file() else b""


def _split_on_newline(content: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def parse_diffs(text: bytes, *, source: str) -> tuple[FileDiff, ...]:
    """Read every file diff in `text`; text before the first one is ignored.

    Raises PatchError, naming `source`, for anything but edited and new text files with full blob ids.
    """
    lines = _split_on_newline(text)
    starts = [i for i, line in enumerate(lines) if line.startswith(b"diff --git ")]
    ends = [*starts, len(lines)][1:]
    return tuple(_parse_file(lines[a:b], source) for a, b in zip(starts, ends, strict=True))


def _parse_file(lines: list[bytes], source: str) -> FileDiff:
    names = _DIFF.fullmatch(lines[0].rstrip())
    if names is None or names["old"] != names["new"]:
        raise PatchError(f"{source}: unreadable or renaming {lines[0]!r}")

    path = names["new"].decode()
    if path.startswith("/") or ".." in path.split("/"):
        raise PatchError(f"{source}: {path} leaves the tree")

    new_file = any(line.startswith(b"new file mode 100") for line in lines[1:2])
    index = _INDEX.fullmatch(b"".join(lines[1 + new_file : 2 + new_file]).rstrip())
    if index is None:
        raise PatchError(
            f"{source}: {path} has no index line with full blob ids; export it with `patch refresh`"
        )

    old_id, new_id = index["old"].decode(), index["new"].decode()
    if new_id == NULL_ID:
        raise PatchError(f"{source}: {path} is deleted, which is not supported")
    return FileDiff(path=path, old_id=old_id, new_id=new_id, text=b"".join(lines))


def format_diff(path: str, old: bytes | None, new: bytes) -> bytes:
    """Return the diff that turns `old` (None: the file is new) into `new`, in the format of `parse_diffs`.

    Deterministic on every machine. Raises PatchError if a file has no newline at its end.
    """
    for content in (old, new):
        if content and not content.endswith(b"\n"):
            raise PatchError(f"{path} has no newline at its end, which is not supported")

    old_id = NULL_ID if old is None else blob_id(old)
    name = path.encode()
    head = b"diff --git a/%s b/%s\n" % (name, name)
    mode = b" 100644"
    if old is None:
        head += b"new file mode 100644\n"
        mode = b""
    head += b"index %s..%s%s\n" % (old_id.encode(), blob_id(new).encode(), mode)

    body = difflib.diff_bytes(
        difflib.unified_diff,
        _split_on_newline(old or b""),
        _split_on_newline(new),
        b"/dev/null" if old is None else b"a/" + name,
        b"b/" + name,
    )
    return head + b"".join(line if line.endswith(b"\n") else line + b"\n" for line in body)

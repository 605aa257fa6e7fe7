# SPDX-License-Identifier: Apache-2.0
"""Read, apply and write the diffs of `patches/`: a strict subset of git's format, in bytes.

Deliberately narrow. A hunk applies at exactly its line numbers with exactly its context, or not at all (no
fuzz, no offset), and both ends are checked against the blob ids in the `index` line. Renames, deletions,
mode changes and binary hunks are refused. `git apply` is not used: inside an ignored folder of another
repository, where our verl tree is, it exits with 0 and changes nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from recipe.async_pipeline.errors import PatchError

NULL_ID = "0" * 40
"""The blob id that git writes for a file that does not exist."""

_DIFF = re.compile(rb"diff --git a/(?P<old>\S+) b/(?P<new>\S+)")
_INDEX = re.compile(rb"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40})( 100(644|755))?")
_HUNK = re.compile(rb"@@ -(?P<start>\d+)(,(?P<old>\d+))? \+\d+(,(?P<new>\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"


def blob_id(content: bytes) -> str:
    """Return git's blob id of a file with this content (40 hex digits)."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """Lines `old` at line `start` (counted from 0) become `new`; each line keeps its line end."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class FileDiff:
    """The change that one patch makes to one file, and the blob ids before and after."""

    path: str
    """Relative to the root of the verl tree, with forward slashes."""
    old_id: str
    new_id: str
    hunks: tuple[Hunk, ...]

    @property
    def creates(self) -> bool:
        """Whether the file does not exist before the patch."""
        return self.old_id == NULL_ID

    def apply(self, content: bytes) -> bytes:
        """Return the file after the patch. Raises PatchError if the content or the result is unexpected."""
        self._check(content, self.old_id, "before")
        result = _replace(content, [(h.start, h.old, h.new) for h in self.hunks], self.path)
        self._check(result, self.new_id, "after")
        return result

    def revert(self, content: bytes) -> bytes:
        """Return the file before the patch (empty if the patch creates it). Raises as `apply`."""
        self._check(content, self.new_id, "before reverting")
        moved, shift = [], 0
        for hunk in self.hunks:
            moved.append((hunk.start + shift, hunk.new, hunk.old))
            shift += len(hunk.new) - len(hunk.old)
        result = _replace(content, moved, self.path)
        self._check(result, self.old_id, "after reverting")
        return result

    def _check(self, content: bytes, expected: str, moment: str) -> None:
        actual = NULL_ID if expected == NULL_ID and not content else blob_id(content)
        if actual != expected:
            raise PatchError(f"{self.path} has blob id {actual} {moment}, the patch expects {expected}")


def _replace(
    content: bytes, edits: list[tuple[int, tuple[bytes, ...], tuple[bytes, ...]]], path: str
) -> bytes:
    """Apply the (start, old, new) edits; raise PatchError if the old lines do not match."""
    lines = _split_on_newline(content)
    result: list[bytes] = []
    done = 0
    for start, old, new in edits:
        if start < done or tuple(lines[start : start + len(old)]) != old:
            raise PatchError(f"{path}: the hunk at line {start + 1} does not match")
        result += lines[done:start]
        result += new
        done = start + len(old)
    return b"".join(result + lines[done:])


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

    rest = lines[1:]
    if rest and rest[0].rstrip() in (b"new file mode 100644", b"new file mode 100755"):
        rest = rest[1:]
    index = _INDEX.fullmatch(rest[0].rstrip()) if rest else None
    if index is None:
        raise PatchError(
            f"{source}: {path} has no index line with full blob ids; export it with `patch refresh`"
        )

    old_id, new_id = index["old"].decode(), index["new"].decode()
    if new_id == NULL_ID:
        raise PatchError(f"{source}: {path} is deleted, which is not supported")

    hunks = tuple(_parse_hunks(rest[3:], f"{source}: {path}"))
    return FileDiff(path=path, old_id=old_id, new_id=new_id, hunks=hunks)


def _parse_hunks(lines: list[bytes], where: str) -> Iterator[Hunk]:
    position = 0
    while position < len(lines):
        head = _HUNK.match(lines[position])
        if head is None:
            raise PatchError(f"{where}: expected a hunk, found {lines[position]!r}")

        counts = {b"-": int(head["old"] or 1), b"+": int(head["new"] or 1)}
        old: list[bytes] = []
        new: list[bytes] = []
        position += 1
        while position < len(lines) and not lines[position].startswith(b"@@"):
            _read_line(lines[position], old, new, where)
            position += 1
        if (len(old), len(new)) != (counts[b"-"], counts[b"+"]):
            raise PatchError(f"{where}: a hunk announces {counts}, holds {len(old)} and {len(new)} lines")

        # A hunk without old lines counts its start from the line before it.
        start = int(head["start"]) - (1 if old else 0)
        yield Hunk(start=start, old=tuple(old), new=tuple(new))


def _read_line(line: bytes, old: list[bytes], new: list[bytes], where: str) -> None:
    """Add one line of a hunk to its old lines, its new lines, or both."""
    kind, body = line[:1], line[1:]
    if line == b"\n":  # an editor stripped the one space of an empty context line
        kind, body = b" ", b"\n"
    if line.rstrip() == _NO_NEWLINE:
        raise PatchError(f"{where}: a file without a newline at its end, which is not supported")
    if kind not in (b" ", b"-", b"+"):
        raise PatchError(f"{where}: unreadable line {line!r}")
    if kind != b"+":
        old.append(body)
    if kind != b"-":
        new.append(body)


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

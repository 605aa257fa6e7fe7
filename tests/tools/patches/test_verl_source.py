# SPDX-License-Identifier: Apache-2.0
"""Fetching verl checks hash and contents, leaves no partial tree, and links an existing clone."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.tools.patches import verl_source

VERSION_FILE = "verl-1.2/verl/version/version"


def make_sdist(file: Path, members: dict[str, bytes], *, link: str = "") -> None:
    with tarfile.open(file, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type = tarfile.SYMTYPE
            info.linkname = "/etc/passwd"
            archive.addfile(info)


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    file = tmp_path / "published.tar.gz"
    make_sdist(file, {VERSION_FILE: b"1.2\n", "verl-1.2/verl/__init__.py": b"# verl\n"})
    return file


@pytest.fixture
def folder(tmp_path: Path, sdist: Path) -> Path:
    """A patches folder whose PIN names `sdist`."""
    folder = tmp_path / "project" / "patches"
    folder.mkdir(parents=True)
    sha256 = hashlib.sha256(sdist.read_bytes()).hexdigest()
    (folder / "PIN").write_text(f"name: verl\nversion: 1.2\ntag: v1.2\nsha256: {sha256}\n")
    return folder


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, sdist: Path) -> list[str]:
    """Replace pip; return the log of downloads."""
    log: list[str] = []

    def download(pin: verl_source.Pin, target: Path) -> None:
        log.append(pin.stem)
        (target / f"{pin.stem}.tar.gz").write_bytes(sdist.read_bytes())

    monkeypatch.setattr(verl_source, "_pip_download", download)
    return log


def make_clone(root: Path, version: str) -> Path:
    (root / "verl" / "version").mkdir(parents=True)
    (root / "verl" / "version" / "version").write_text(version + "\n")
    return root


def test_fetch_downloads_once_and_unpacks(folder: Path, downloads: list[str]) -> None:
    root = verl_source.fetch(folder)
    assert root == folder.parent / ".cache/verl/verl-1.2"
    assert (root / "verl/__init__.py").read_bytes() == b"# verl\n"
    (root / "verl/__init__.py").write_bytes(b"edited")
    assert verl_source.fetch(folder) == root
    assert (root / "verl/__init__.py").read_bytes() == b"edited"
    verl_source.fetch(folder, fresh=True)
    assert (root / "verl/__init__.py").read_bytes() == b"# verl\n"
    assert downloads == ["verl-1.2"]
    assert sorted(entry.name for entry in root.parent.iterdir()) == ["verl-1.2", "verl-1.2.tar.gz"]


def test_a_wrong_hash_is_refused_and_the_file_not_kept(
    folder: Path, downloads: list[str], sdist: Path
) -> None:
    sdist.write_bytes(sdist.read_bytes() + b"\0")
    with pytest.raises(PatchError, match="sha256"):
        verl_source.fetch(folder)
    assert downloads and list((folder.parent / ".cache/verl").iterdir()) == []


@pytest.mark.parametrize("name", ["/etc/x", "verl-1.2/../../x", "other/x"])
def test_a_member_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    make_sdist(tmp_path / "s.tar.gz", {VERSION_FILE: b"1.2\n", name: b"x"})
    with pytest.raises(PatchError, match="not unpacked"):
        verl_source.unpack(tmp_path / "s.tar.gz", tmp_path / "out", top="verl-1.2")
    assert not (tmp_path / "out").exists()


def test_a_link_in_the_sdist_is_refused(tmp_path: Path) -> None:
    make_sdist(tmp_path / "s.tar.gz", {}, link="verl-1.2/verl/link")
    with pytest.raises(PatchError, match="verl/link"):
        verl_source.unpack(tmp_path / "s.tar.gz", tmp_path / "out", top="verl-1.2")


def test_a_pip_failure_is_quoted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(PatchError, match="could not download verl-1.2.*--verl-dir"):
        verl_source.fetch(folder)


def test_a_clone_of_the_pinned_version_is_linked(folder: Path, tmp_path: Path, downloads: list[str]) -> None:
    clone = make_clone(tmp_path / "clone", "1.2")
    link = verl_source.adopt(folder, clone)
    assert link.resolve() == clone and verl_source.default_verl_root(folder) == link
    assert verl_source.adopt(folder, clone) == link
    assert verl_source.fetch(folder) == link and downloads == []
    assert not verl_source.fetch(folder, fresh=True).is_symlink()
    assert (clone / "verl/version/version").exists()


def test_a_clone_of_another_version_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=r"is verl 1\.3, the patches are for 1\.2; run `git checkout v1\.2`"):
        verl_source.adopt(folder, make_clone(tmp_path / "clone", "1.3"))
    with pytest.raises(PatchError, match="is not a verl checkout"):
        verl_source.adopt(folder, tmp_path)


def test_a_clone_replaces_a_fetched_tree_only_with_fresh(
    folder: Path, tmp_path: Path, downloads: list[str]
) -> None:
    root = verl_source.fetch(folder)
    clone = make_clone(tmp_path / "clone", "1.2")
    with pytest.raises(PatchError, match="--fresh"):
        verl_source.adopt(folder, clone)
    assert not root.is_symlink()
    assert verl_source.adopt(folder, clone, fresh=True).resolve() == clone


def test_published_file_reads_the_sdist(folder: Path, downloads: list[str]) -> None:
    assert verl_source.published_file(folder, "verl/__init__.py") == b"# verl\n"
    assert verl_source.published_file(folder, "verl/nothing.py") is None


def test_pin_with_a_missing_field_is_refused(folder: Path) -> None:
    (folder / "PIN").write_text("name: verl\n")
    with pytest.raises(PatchError, match="must hold exactly name, version, tag, sha256"):
        verl_source.read_pin(folder)


def test_a_series_for_another_version_has_its_own_folder(folder: Path, tmp_path: Path) -> None:
    def tree_of(version: str) -> Path:
        file = tmp_path / version / "verl" / "version" / "version"
        file.parent.mkdir(parents=True)
        file.write_text(version + "\n")
        return tmp_path / version

    (folder / "next").mkdir()
    (folder / "next" / "PIN").write_text("name: verl\nversion: 1.3\ntag: v1.3\nsha256: 0\n")
    assert verl_source.series_folder(tree_of("1.3"), folder) == folder / "next"
    assert verl_source.series_folder(tree_of("1.2"), folder) == folder
    assert verl_source.series_folder(tree_of("1.4"), folder) == folder, "no series is made for it"
    assert verl_source.series_folder(tmp_path / "none", folder) == folder

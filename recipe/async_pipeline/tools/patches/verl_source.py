# SPDX-License-Identifier: Apache-2.0
"""Locate verl's source tree: the pinned sdist, a git clone, or the importable package.

Does not import verl. A *root* is the folder that contains the package: `root/verl/__init__.py` exists.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed import verl
from recipe.async_pipeline.installed.verl import patches_dir

DOWNLOAD_TIMEOUT_S = 600.0
"""Deadline for pip, which retries by itself; the sdist is 2 MB."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The one version of verl that the patches are made for."""

    name: str
    version: str
    tag: str
    """Tag of the same source in verl's git repository."""
    sha256: str
    """SHA-256 of the published sdist."""

    @property
    def stem(self) -> str:
        """Name of the sdist without its suffix, and of the folder that it unpacks to."""
        return f"{self.name}-{self.version}"


def read_pin(folder: Path) -> Pin:
    """Read `folder/PIN`. Raises PatchError if a field is missing or unknown."""
    file = folder / "PIN"
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    try:
        return Pin(**fields)
    except TypeError:
        wanted = ", ".join(Pin.__dataclass_fields__)
        raise PatchError(f"{file} must hold exactly {wanted}; it holds {', '.join(fields)}") from None


def cache_dir(folder: Path) -> Path:
    """Return the folder for the sdist and its tree: `.cache/verl` in the checkout that holds `folder`."""
    return folder.parent / ".cache" / "verl"


def default_verl_root(folder: Path) -> Path:
    """Return the root of the fetched tree if there is one, else of the importable verl."""
    fetched = cache_dir(folder) / read_pin(folder).stem
    return fetched if fetched.is_dir() else verl.find_verl_root()


def version_of(root: Path) -> str:
    """Return the version of the verl at `root`. Raises PatchError if it has no version file."""
    version = verl.version_in(root)
    if version is None:
        raise PatchError(
            f"{root} is not a verl checkout: verl/version/version is missing; give the folder that contains "
            "verl/"
        )
    return version


def series_folder(root: Path, folder: Path | None = None) -> Path:
    """Return the folder of the series for the verl at `root`: `folder` itself, or a folder in it.

    `folder` is `patches/` by default. Each folder in it with a PIN has the series for another version.
    Returns `folder` itself if none is made for the version of `root`.
    """
    folder = folder or patches_dir()
    version = verl.version_in(root)
    pins = sorted(pin.parent for pin in folder.glob("*/PIN"))
    return next((other for other in pins if read_pin(other).version == version), folder)


def check_version(root: Path, pin: Pin) -> None:
    """Raise PatchError if `root` does not hold the pinned version of verl."""
    version = version_of(root)
    if version != pin.version:
        raise PatchError(
            f"{root} is verl {version}, the patches are for {pin.version}; run `git checkout {pin.tag}` "
            "there, or leave --verl-dir out to fetch the published source"
        )


def fetch(folder: Path, *, fresh: bool = False) -> Path:
    """Fetch the pinned, published tree into the cache and return its root; a no-op if it exists.

    `fresh` unpacks the tree again, which discards every edit. Waits for pip, at most DOWNLOAD_TIMEOUT_S.
    Raises PatchError if the download fails, or its hash or contents are wrong.
    """
    pin = read_pin(folder)
    root = cache_dir(folder) / pin.stem
    if root.is_dir() and not fresh:
        check_version(root, pin)
        return root

    sdist = fetch_sdist(folder)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=sdist.parent) as scratch:
        unpack(sdist, Path(scratch), top=pin.stem)
        check_version(Path(scratch) / pin.stem, pin)
        if root.is_symlink():  # an adopted clone: remove the link only
            root.unlink()
        elif root.exists():
            root.rename(Path(scratch) / "replaced")
        (Path(scratch) / pin.stem).rename(root)
    return root


def adopt(folder: Path, checkout: Path, *, fresh: bool = False) -> Path:
    """Use an existing checkout as the tree, through a link in the cache; return the link.

    Raises PatchError if the checkout has another version, or a fetched tree exists and `fresh` is not set.
    """
    pin = read_pin(folder)
    checkout = checkout.resolve()
    check_version(checkout, pin)

    link = cache_dir(folder) / pin.stem
    if link.is_dir() and link.resolve() == checkout:
        return link
    if link.is_dir() and not link.is_symlink():
        if not fresh:
            raise PatchError(f"{link} exists already; add --fresh to replace it by a link to {checkout}")
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(checkout, target_is_directory=True)
    return link


def fetch_sdist(folder: Path) -> Path:
    """Download the pinned sdist into the cache unless it is there; check its hash and return its path.

    Raises PatchError if the download fails or the hash is wrong; a new file is not kept then.
    """
    pin = read_pin(folder)
    kept = cache_dir(folder) / f"{pin.stem}.tar.gz"
    if kept.is_file():
        check_hash(kept, pin)
        return kept

    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=kept.parent) as scratch:
        _pip_download(pin, Path(scratch))
        found = sorted(Path(scratch).glob("*.tar.gz"))
        if len(found) != 1:
            raise PatchError(f"pip left {len(found)} sdists of {pin.stem}, expected one; retry")
        check_hash(found[0], pin)
        found[0].rename(kept)
    return kept


def _pip_download(pin: Pin, target: Path) -> None:
    # --no-build-isolation: pip builds the metadata even of an sdist that it only downloads, and would first
    # install a build environment; our environment has setuptools and wheel already.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", pin.name, "--dest", str(target), f"{pin.name}=={pin.version}"]

    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise PatchError(
            f"pip could not download {pin.stem}: {last}; check the network, or pass --verl-dir with a clone "
            f"of verl at {pin.tag}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PatchError(
            f"pip did not download {pin.stem} within {DOWNLOAD_TIMEOUT_S:.0f} s; retry"
        ) from error


def check_hash(sdist: Path, pin: Pin) -> None:
    """Raise PatchError if `sdist` is not the pinned file."""
    actual = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if actual != pin.sha256:
        raise PatchError(f"{sdist} has sha256 {actual}, PIN has {pin.sha256}; delete it and fetch again")


def unpack(sdist: Path, target: Path, *, top: str) -> None:
    """Unpack `sdist` into `target`.

    Raises PatchError, and unpacks nothing, if a member is not a plain file or folder below `top`.
    """
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        for member in members:
            parts = PurePosixPath(member.name).parts
            if parts[:1] != (top,) or ".." in parts or not (member.isfile() or member.isdir()):
                raise PatchError(
                    f"{sdist} holds {member.name!r}, which is not a plain file below {top}/; not unpacked"
                )

        # If this Python has the filter, it checks again; some versions warn if none is set.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(target, members)


def published_file(folder: Path, path: str) -> bytes | None:
    """Return the contents of `path` (relative to the root) in the pinned sdist, or None if it is absent."""
    with tarfile.open(fetch_sdist(folder)) as archive:
        try:
            member = archive.extractfile(f"{read_pin(folder).stem}/{path}")
        except KeyError:
            return None
        return None if member is None else member.read()

# SPDX-License-Identifier: Apache-2.0
"""What a machine or container must offer before Ray starts on it; `doctor` has a row for each.

Ray, and the stack after it, would end with some twenty lines of traceback, or with a bus error in a worker.
Imports only the standard library.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import shutil
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...errors import ConfigError

SHM = Path("/dev/shm")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
LEAST_SHM_BYTES = 128_000_000
"""Shared memory for a model of unknown size. A container has 64 MB by default, which holds no weights."""
LEAST_OPEN_FILES = 1024
"""Of the hard limit, up to which `ray.init` raises the soft one. Ray's own processes need some hundreds."""
MAX_SOCKET_BYTES = 107
"""Longest path of a Unix socket on Linux."""
ENGINE_SOCKET = "00000000-0000-0000-0000-000000000000"
"""The longest name of a socket below TMPDIR, which is vLLM's."""
SOCKET = "ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""Ray's longest one, below its temporary folder."""
MAX_PID = 4_194_304
DRIVER = Path("/proc/driver/nvidia/version")
LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""By major version of CUDA, the first one of NVIDIA's driver that runs its programs."""


class MachineState(NamedTuple):
    """What was found of one need."""

    subject: str
    """As a row of `doctor` names it."""
    detail: str
    """With a remedy it is a rule and what there is instead, as in an error."""
    remedy: str = ""
    """Empty if all is well."""
    fatal: bool = True
    """Whether no run can start; else it may do without."""


def states(
    *,
    needed_shm_bytes: int | None = None,
    store_bytes: int | None = None,
    temporary: str | None = None,
) -> tuple[MachineState, ...]:
    """Check all needs of this machine.

    `needed_shm_bytes`: of the weights, if they are known. `store_bytes`: at most of the sample store, if the
    lengths are known. `temporary`: Ray's temporary folder, if the user has named one.
    """
    return (
        home(),
        user(),
        host_name(),
        temporary_folder(temporary),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        shared_memory(SHM, needed_shm_bytes),
        memory(memory_bytes(), store_bytes or 0),
        driver(DRIVER, _cuda_of_torch()),
    )


def require_machine(
    *, needed_shm_bytes: int | None, store_bytes: int | None, temporary: str | None
) -> tuple[str, ...]:
    """Return a line for each need that a run may do without.

    Raises ConfigError with a line for each that it cannot. Arguments: see `states`.
    """
    found = states(needed_shm_bytes=needed_shm_bytes, store_bytes=store_bytes, temporary=temporary)
    lacking = [state for state in found if state.remedy]
    if fatal := [f"{state.detail}; {state.remedy}" for state in lacking if state.fatal]:
        raise ConfigError(*fatal)
    return tuple(f"WARNING: {state.detail}; {state.remedy}" for state in lacking)


def home() -> MachineState:
    """Check that the home folder takes files: Ray's token and the caches of the stack are there."""
    path = os.path.expanduser("~")
    try:
        with tempfile.TemporaryFile(dir=path):
            return MachineState("home", f"{path} is writable")
    except OSError as error:
        return MachineState(
            "home",
            f"HOME must be a writable folder, got {path} ({error.strerror})",
            "set HOME to one: Ray keeps its token there, and engines and data sets their caches",
        )


def user() -> MachineState:
    """Check that the user has a name, of which some tools make names of files."""
    if name := next(filter(None, map(os.environ.get, ("LOGNAME", "USER", "LNAME", "USERNAME"))), None):
        return MachineState("user", name)
    try:
        return MachineState("user", pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return MachineState(
            "user",
            f"uid {os.getuid()} must have a name, got none in /etc/passwd and no USER",
            "set USER, or torch's and vLLM's debugging tools fail",
            fatal=False,
        )


def host_name() -> MachineState:
    """Check that the host's name has an address, which processes on other hosts would use."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return MachineState(
            "host name",
            f"the host name {name} must have an address, got none ({error.strerror})",
            "add it to /etc/hosts: torch uses the loopback address, which works on one machine only",
            fatal=False,
        )
    return MachineState("host name", f"{name} has an address")


def temporary_folder(named: str | None) -> MachineState:
    """Check that Ray's sockets have short paths, and that its folder can be written to."""
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    key = "ray_kwargs.ray_init._temp_dir" if named else variable or "TMPDIR"
    folder = named or os.environ.get(variable or "", "/tmp")
    # Ray appends its own name to the folder of the system, but not to one that was named for it.
    below = SOCKET.removeprefix("ray/" if named else "").format(pid=MAX_PID)
    most = MAX_SOCKET_BYTES - len(below) - 1
    length = len(os.fsencode(folder))
    if length > most:
        return MachineState(
            "temporary folder",
            f"{key} must have at most {most} bytes, got {length}: {folder}",
            "set RAY_TMPDIR to a shorter one, such as /tmp, because Ray's sockets are below it",
        )
    # Python and the engines make sockets there, wherever Ray's are.
    own, most = os.environ.get("TMPDIR", "/tmp"), MAX_SOCKET_BYTES - len(ENGINE_SOCKET) - 1
    if (length := len(os.fsencode(own))) > most:
        return MachineState(
            "temporary folder",
            f"TMPDIR must have at most {most} bytes, got {length}: {own}",
            "set it to a shorter one, such as /tmp, because the engines' sockets are below it",
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return MachineState("temporary folder", f"{folder} is writable, and short enough for sockets")
    except OSError as error:
        return MachineState(
            "temporary folder",
            f"{key} must be a writable folder, got {folder} ({error.strerror})",
            "set RAY_TMPDIR to one",
        )


def open_files(hard: int) -> MachineState:
    """Check the hard limit on open files."""
    if hard == resource.RLIM_INFINITY or hard >= LEAST_OPEN_FILES:
        return MachineState("open files", "unlimited" if hard == resource.RLIM_INFINITY else str(hard))
    return MachineState(
        "open files",
        f"the hard limit on open files must be at least {LEAST_OPEN_FILES}, got {hard}",
        "raise it: `ulimit -Hn`, limits.conf, LimitNOFILE, or --ulimit nofile of a container",
    )


def shared_memory(folder: Path, needed_bytes: int | None) -> MachineState:
    """Check that two versions of the weights fit."""
    least = LEAST_SHM_BYTES if needed_bytes is None else needed_bytes
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return MachineState(
            "shared memory", f"{folder} must be there, got none ({error.strerror})", "mount a tmpfs there"
        )
    if free >= least:
        return MachineState("shared memory", f"{free / 1e9:.1f} GB free in {folder}")
    what = "" if needed_bytes is None else " for two copies of the weights"
    return MachineState(
        "shared memory",
        f"{folder} must have {least / 1e9:.2f} GB free{what}, got {free / 1e9:.2f}",
        "start the container with a larger --shm-size, or delete the leftovers of dead runs",
    )


def memory(has_bytes: int, store_bytes: int) -> MachineState:
    """Check that the sample store could hold all rows at their full length."""
    if store_bytes <= has_bytes:
        return MachineState("memory", f"{has_bytes / 1e9:.1f} GB")
    return MachineState(
        "memory",
        f"the sample store may hold up to {store_bytes / 1e9:.1f} GB if all responses have their full "
        f"length, and this machine has {has_bytes / 1e9:.1f} GB",
        "use a smaller batch, rollout.n, staleness.max_lag or response length",
        fatal=False,
    )


def driver(file: Path, cuda: str) -> MachineState:
    """Check that NVIDIA's driver, which says its version in a file, runs programs of a version of CUDA."""
    try:
        found = re.search(r"Module .*?(\d+)\.\d", file.read_text(encoding="utf-8"))
    except OSError:
        return MachineState("driver", "none of NVIDIA")
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0] or 0))
    if found is None or (cuda and least is None):
        version = found[1] if found else "of unknown version"
        return MachineState("driver", f"NVIDIA's {version}, not compared with CUDA {cuda or 'of no torch'}")
    if least is None or int(found[1]) >= least:
        return MachineState("driver", f"NVIDIA's {found[1]}")
    return MachineState(
        "driver",
        f"NVIDIA's driver must be {least} or newer for CUDA {cuda} of the installed torch, got {found[1]}",
        "update it, or install a torch for an older CUDA or NVIDIA's package cuda-compat",
        fatal=False,
    )


def _cuda_of_torch() -> str:
    """Return the version of CUDA that the installed torch was built for, or nothing. Does not import it."""
    spec = find_spec("torch")
    try:
        text = Path((spec and spec.origin) or "").with_name("version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else ""


def memory_bytes() -> int:
    """Return the memory of the machine, or of the container if it has less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # "max" is no limit
        return machine

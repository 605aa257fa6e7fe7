# SPDX-License-Identifier: Apache-2.0
"""A process that runs one command, and ends with everything that it started.

    worker ──lifeline──► guard ──► command: own process group, own folder, own environment

    python -I -S command_process.py LIFELINE REPORT < {"command": [...], "cwd": "...", "env": {...}}

The guard ends with the status of the command. It kills the command's process group when the command ends,
when the lifeline, a pipe, is closed, and when the worker dies in any way. The kernel kills the command if the
guard is killed. The environment arrives over stdin, because every user of the machine can read command lines.
Orphans of the command become children of the guard, so that it can also kill processes that left the group,
such as daemons, and then their orphans. It writes to REPORT, a pipe, how many still run after that.

If it gets `mounts` too (`sandbox.Sandbox.mounts`), the command is in a sandbox, namespaces of Linux:

    guard ──► init of new namespaces: users, processes, mounts, IPC ──► command, without capabilities

The kernel kills all its processes when init ends, which nothing inside can kill or trace. The mounts cannot
be undone: nothing inside has a capability, and further namespaces inherit the mounts as one.

If the mounts have `gateway`, an address or nothing, it also has its own network, where 127.0.0.1 has the port
of that address and nothing else. It sends the listening socket to the guard, which passes connections on.

The guard is run as a file and imports the standard library only: an episode should not pay for more.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_SET_PDEATHSIG, _SET_DUMPABLE, _CAPBSET_DROP, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000
"""Of mounts, IPC, users and processes."""
_NEW_NETWORK, _SET_INTERFACE_FLAGS, _INTERFACE_UP = 0x40000000, 0x8914, 1
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _RDONLY = 442, -100, 0x8000, 1
_CAPABILITY_VERSION = 0x20080522
NO_SANDBOX = 125
"""Exit status if there is no sandbox, as `docker run` has it."""
HIDDEN_BYTES = 1 << 30
"""What a command may write into each hidden folder, such as /tmp; it is in memory."""
NOT_STARTED = 127
"""Exit status if the command cannot be started, as shells have it."""
MOST_FILES = 1 << 20
"""The limit on open files may be infinite, but the kernel's own is about this."""
CHILDREN_END_S = 1.0
"""Seconds that killed processes get to disappear before they are counted."""


def main(arguments: list[str]) -> int:
    """Run as guard. Returns the exit status of the command, 128 + n if signal n killed it."""
    lifeline, report = map(int, arguments)
    spec = json.load(sys.stdin)
    adopt_orphans()
    gateway = (spec.get("mounts") or {}).get("gateway")
    here, there = socket.socketpair()
    command = os.fork()
    if command == 0:
        os.close(lifeline)
        os.close(report)
        run(spec, there)
    there.close()
    if gateway:
        start_thread(forward, here, gateway)

    try:
        os.setpgid(command, command)
    except PermissionError:  # the child was faster, and its program has begun
        pass
    signal.signal(signal.SIGCHLD, lambda *_: reap_orphans(command))
    try:
        return guard(command, lifeline)
    finally:
        left = end_children()
        try:
            os.write(report, str(left).encode())
        except OSError:
            pass  # the worker is gone


def adopt_orphans() -> None:
    """Make orphans of descendants children of this process."""
    if sys.platform == "linux":
        _prctl(_SET_CHILD_SUBREAPER, 1)


def run(spec: Mapping[str, Any], guard: socket.socket) -> None:
    """Replace this process by the command, or by the init of its sandbox. Exits if it cannot be started."""
    if sys.platform == "linux":
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_SET_NO_NEW_PRIVS, 1)
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if spec.get("mounts") is None:
        execute(spec)
    try:
        gateway = spec["mounts"].get("gateway")
        new_namespaces(0 if gateway is None else _NEW_NETWORK)
        if gateway:
            listen(gateway, guard)
        init = os.fork()
        if init == 0:
            _prctl(_SET_PDEATHSIG, signal.SIGKILL)
            hide(spec["mounts"])
            drop_capabilities()
            init = run_in_session(spec)
        os._exit(exit_status(wait_for(init)))
    except OSError as error:
        os.write(2, f"no sandbox: {error.strerror}\n".encode())
        os._exit(NO_SANDBOX)


def execute(spec: Mapping[str, Any]) -> None:
    """Replace this process by the command. Exits if it cannot be started."""
    try:
        os.chdir(spec["cwd"])
        in_memory = {name: file_in_memory(text) for name, text in spec.get("in_memory", {}).items()}
        os.execvpe(spec["command"][0], spec["command"], {**spec["env"], **in_memory})
    except OSError as error:
        os.write(2, f"{spec['command'][0]}: {error.strerror}\n".encode())
        os._exit(NOT_STARTED)


def file_in_memory(text: str) -> str:
    """Return the path of a file that has no name in any folder: a descriptor of this process.

    Its number is random: an agent could leave a link to a known one in place of its answer.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with open(os.memfd_create("file"), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        least = int.from_bytes(os.urandom(4), "little") % (min(most, MOST_FILES) // 2)
        descriptor = fcntl.fcntl(file, fcntl.F_DUPFD, least)
    return f"/dev/fd/{descriptor}"


def new_namespaces(further: int = 0) -> None:
    """Put this process and its children into new namespaces, with the same user. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_NAMESPACES | further)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def listen(address: str, guard: socket.socket) -> None:
    """Have the guard listen on the port of an address, in a network that is new. Raises OSError."""
    with socket.socket() as listening:
        fcntl.ioctl(listening, _SET_INTERFACE_FLAGS, struct.pack("16sh22x", b"lo", _INTERFACE_UP))
        listening.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        listening.listen()
        socket.send_fds(guard, [b"."], [listening.fileno()])


def forward(command: socket.socket, address: str) -> None:
    """Receive the socket that listens in the command's network, and pass connections on to an address."""
    host, _, port = address.rpartition(":")
    _, received, _, _ = socket.recv_fds(command, 1, 1)
    if not received:
        return  # there is no sandbox
    listening = socket.socket(fileno=received[0])
    while True:
        client, _ = listening.accept()
        try:
            server = socket.create_connection((host.strip("[]"), int(port)))
        except OSError:
            client.close()
            continue
        start_thread(pass_on, client, server)
        start_thread(pass_on, server, client)


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass on what arrives until its end, which is passed on too."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One side is gone, and the other must learn of it.
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def start_thread(function: Callable[..., None], *arguments: Any) -> None:
    """Start a thread that ends with the process."""
    threading.Thread(target=function, args=arguments, daemon=True).start()


def hide(mounts: Mapping[str, list[str]]) -> None:
    """Make all files read-only except for `writable` paths, and replace `hidden` ones by empty ones.

    What is `writable` or `shown` is there again, also in hidden folders; of two paths the longer one counts.
    Raises OSError.
    """
    _mount(None, "/", None, _REC | _PRIVATE)
    kinds = {
        os.path.realpath(path): kind for kind in ("hidden", "shown", "writable") for path in mounts[kind]
    }
    opened = {path: os.open(path, os.O_PATH) for path in kinds if os.path.exists(path)}
    _set_read_only("/", True)
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for path, file in sorted(opened.items(), key=lambda one: one[0].split(os.sep)):
        source = f"/proc/self/fd/{file}"
        is_folder = os.path.isdir(source)
        if kinds[path] != "hidden":
            make_target(path, is_folder)
            _mount(source, path, None, _BIND | _REC)
            _set_read_only(path, kinds[path] == "shown")
        elif os.path.exists(path):  # else it is in a hidden folder
            if is_folder:
                _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, f"size={HIDDEN_BYTES},mode=1777")
            else:
                _mount(os.devnull, path, None, _BIND)
    for file in opened.values():
        os.close(file)
    os.chdir("/")


def make_target(path: str, is_folder: bool) -> None:
    """Make a path in a hidden folder, onto which something can be mounted."""
    if not os.path.exists(path):
        os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
        if not is_folder:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))


def drop_capabilities() -> None:
    """Give up the capabilities that the namespace of users has given to this process. Raises OSError."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    for number in range(last + 1):
        _prctl(_CAPBSET_DROP, number)
    _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    # The command, which has the same rights, may neither trace init nor read its memory.
    _prctl(_SET_DUMPABLE, 0)


def run_in_session(spec: Mapping[str, Any]) -> int:
    """Start the command as a child without a terminal, into whose input it could write. Returns its PID."""
    command = os.fork()
    if command == 0:
        os.setsid()
        execute(spec)
    return command


def wait_for(child: int) -> int:
    """Reap children until one has ended, and return its status."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def exit_status(status: int) -> int:
    """Return the exit status of a process that has ended, 128 + n if signal n killed it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def guard(command: int, lifeline: int) -> int:
    """Wait until the command or the owner of the lifeline ends; then kill the command's process group.

    Returns the command's exit status, 128 + n if signal n killed it.
    """
    # Ctrl-C reaches all processes of a terminal; the owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN | select.POLLHUP)
    waiting.register(os.pidfd_open(command), select.POLLIN)
    status = 0
    try:
        waiting.poll()
    finally:
        # The command is not reaped yet, so no other process group can have its number.
        try:
            os.killpg(command, signal.SIGKILL)
        except ProcessLookupError:
            pass
        status = os.waitpid(command, 0)[1]
    return exit_status(status)


def children() -> list[int]:
    """Return the children of this process; none if the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def reap_orphans(command: int) -> None:
    """Reap what was left to this process and has ended; the command itself is reaped by `guard`."""
    for pid in children():
        if pid != command:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def end_children() -> int:
    """Kill all children, and what they leave to this process; return how many are still there.

    A child is not reaped before it was killed, so no other process can have its number.
    """
    until = time.monotonic() + CHILDREN_END_S
    while True:
        reap_orphans(0)
        left = children()
        if not left or time.monotonic() > until:
            return len(left)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # it is counted if it stays
        time.sleep(0.01)


def _set_read_only(path: str, value: bool) -> None:
    """Change a mount, and those below it."""
    # attr_set, attr_clr, propagation, userns_fd
    attributes = (ctypes.c_uint64 * 4)(_RDONLY if value else 0, 0 if value else _RDONLY, 0, 0)
    arguments = (_AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    numbers = (ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
    _call("syscall", ctypes.c_long(_MOUNT_SETATTR), *numbers, what=f"mount_setattr {path}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = (None if one is None else os.fsencode(one) for one in (source, target, kind))
    data = None if options is None else os.fsencode(options)
    _call("mount", *texts, ctypes.c_ulong(flags), data, what=f"mount {target}")


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def _call(name: str, *arguments: Any, what: str = "") -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what or name}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

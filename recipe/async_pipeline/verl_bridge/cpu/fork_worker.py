# SPDX-License-Identifier: Apache-2.0
"""Start a worker process of Ray by a fork from a process that has made the imports of the job.

A raylet runs this script in place of Ray's `setup_worker.py`, with the same arguments. On a CPU each process
of a job imports verl for 10 to 15 s of a core, and a job has about ten of them. The first worker with a
runtime environment starts a fork server, which makes these imports once and lives as long as its raylet. That
worker and all later ones ask the server, on a socket next to the raylet's, to fork a process with their
arguments, variables, folder and descriptors, and end. Ray identifies a worker by an argument, not by its
process.

A worker whose environment was read before a fork could change it (`AT_START`, `AT_IMPORT`) starts as Ray
starts it; so do all, if the imports fail. Not used with accelerators, whose libraries do not survive a fork.

Ray seeds its random ids when a process draws the first one. The fork server must not draw any: its forks
would draw the same ones, in each of their threads, and an actor aborts if two workers call it with the same
id at once. Ray draws one where it makes a class of actors, which many modules do; the fork server has
`ClassIds` there. If an import draws another one, nothing forks.

Imports the standard library alone: a script has no package, and each worker runs it first.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

IMPORTS = "ASYNC_PIPELINE_WORKER_IMPORTS"
"""Environment variable of a raylet: the modules that its fork server imports. Without it, nothing forks."""
RAYLET = "RAY_RAYLET_PID"
AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "MKL_", "KMP_")
"""Beginnings of the variables that are read when a process starts, or loads its libraries."""
AT_IMPORT = ("VERL_", "TORCH", "HF_", "TRANSFORMERS_", "VLLM_", "SGLANG_")
"""Beginnings of the variables that modules read when they are imported."""
OF_ONE_WORKER = "ASYNC_PIPELINE_EARLY_ENGINE"
"""See `cpu/prefork.py`: what this starts belongs to a worker, not to the fork server."""
FORKED, REFUSED = b"1", b"0"
ANSWER_S = 300.0
"""Seconds for the imports; also what it costs if a worker dies before it has registered."""


def main(arguments: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of a worker if this process has been forked as one; None if another one was.

    Does not return if the worker starts as Ray starts it.
    """
    options = dict(word[2:].split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
    context = json.loads(options.get("serialized-runtime-env-context") or "{}")
    variables = context.get("env_vars") or {}
    if variables and _can_fork(options, context, variables):
        name = f"fork.{os.environ[RAYLET]}"  # no longer than the names of Ray's own sockets
        path = os.path.join(os.path.dirname(options["raylet-name"]), name)
        worker = _serve_first(path, arguments[0], variables)
        if worker is not None:
            return worker
        with suppress(OSError):
            if _forked(path, arguments, variables):
                return None
    stock = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, stock, *arguments])


def _can_fork(options: Mapping[str, str], context: Mapping[str, Any], variables: Mapping[str, str]) -> bool:
    return (
        bool(os.environ.get(IMPORTS))
        and RAYLET in os.environ
        and "raylet-name" in options
        and options.get("language") == "PYTHON"
        and options.get("worker-type", "WORKER") == "WORKER"
        and context.get("py_executable") in (None, sys.executable)
        and not context.get("command_prefix")
        and not context.get("override_worker_entrypoint")
        and not _differ(os.environ, {**os.environ, **variables}, AT_START)
    )


def _differ(one: Mapping[str, str], other: Mapping[str, str], beginnings: tuple[str, ...]) -> bool:
    names = {name for name in {*one, *other} if name.startswith(beginnings)}
    return any(one.get(name) != other.get(name) for name in names)


def _forked(path: str, arguments: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Have the fork server start this worker. Raises OSError if the server has ended or does not answer."""
    environment = {**os.environ, **variables}
    request = json.dumps([arguments, environment, os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(ANSWER_S)
        server.connect(path)
        socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(request)
        return server.recv(1) == FORKED


def _serve_first(path: str, worker_path: str, variables: Mapping[str, str]) -> Sequence[str] | None:
    """Start the fork server if none runs; in each process that it forks, return its arguments."""
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o077)  # who may connect may run code
    try:
        listener.bind(path)
    except OSError:  # another worker was first
        listener.close()
        return None
    finally:
        os.umask(mask)
    listener.listen(256)
    if os.fork():
        os.wait()
        listener.close()
        return None
    os.setsid()
    if os.fork():
        os._exit(0)
    return _serve(listener, _import(worker_path, variables))


def _import(worker_path: str, variables: Mapping[str, str]) -> Mapping[str, str]:
    """Make the imports with the variables of the first worker; return the environment before them.

    Raises RuntimeError if they have drawn a random id of Ray.
    """
    sys.path[0] = os.path.dirname(worker_path)
    os.environ.update({name: value for name, value in variables.items() if name != OF_ONE_WORKER})
    before = dict(os.environ)

    from recipe.async_pipeline.verl_bridge import replaced

    replaced.apply("fork server of workers")
    for name in os.environ[IMPORTS].split(","):
        importlib.import_module(name)
    if _id_of_a_fork() == _id_of_a_fork():
        raise RuntimeError(
            "workers are not forked, because they would have the same ids of Ray: the import of one of "
            f"{os.environ[IMPORTS]} draws a random id of Ray"
        )

    gc.collect()
    gc.freeze()  # a collection in a worker leaves these pages shared
    return before


class ClassIds:
    """Takes the place of Ray's `ActorClassID` where Ray makes a class of actors."""

    @staticmethod
    def from_random() -> Any:
        """Return a random id that Ray has not drawn."""
        from ray import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


def _id_of_a_fork() -> bytes:
    """Return the first random id of Ray that a fork of this process draws; empty if it fails."""
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        with suppress(BaseException):
            os.write(theirs, sys.modules["ray"].ObjectRef.from_random().binary())
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with open(ours, "rb") as drawn:
        return drawn.read()


def _serve(listener: socket.socket, before: Mapping[str, str]) -> Sequence[str]:
    """Fork a process for each request until the raylet ends; there, return the arguments of the worker.

    `before`: the environment before the imports, which may have changed it.
    """
    raylet = os.pidfd_open(int(os.environ[RAYLET]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the kernel reaps workers that end
    while True:
        ready, _, _ = select.select([listener.fileno(), raylet], [], [])
        if raylet in ready:
            os._exit(0)
        connection, _ = listener.accept()
        descriptors: list[int] = []
        # The process that asks may be ended while it waits.
        with connection, suppress(OSError, ValueError):
            head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
            size = int.from_bytes(head, "big")
            arguments, environment, folder = json.loads(connection.recv(size, socket.MSG_WAITALL))
            forks = not _differ(before, environment, AT_START + AT_IMPORT)
            if forks and not os.fork():
                break
            connection.sendall(FORKED if forks else REFUSED)
        for descriptor in descriptors:
            os.close(descriptor)
    listener.close()
    os.close(raylet)
    by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return _become(arguments, {**environment, **by_imports}, folder, descriptors)


def _become(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, descriptors: Sequence[int]
) -> Sequence[str]:
    """Take the place of the process that asked: its group, descriptors, folder and variables."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(folder)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # otherwise all workers draw the same; `random` does so by itself
    variables = dict(environment)
    if prefork := sys.modules.get("recipe.async_pipeline.verl_bridge.cpu.prefork"):
        # Before the variables change, since with them changed no process can set its title any more.
        prefork.begin(variables)
    os.environ.clear()
    os.environ.update(variables)
    # Those two were for the script that runs in this one's place.
    others = ("--serialized-runtime-env-context=", "--language=")
    return [word for word in arguments if not word.startswith(others)]


def _run(arguments: Sequence[str]) -> NoReturn:
    """Be a worker of Ray, and end as forked processes do: the fork server's modules are not torn down.

    Libraries would complain on standard error about what they find then.
    """
    sys.argv, status = list(arguments), 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  the process ends
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__" and (worker := main(sys.argv[1:])):
    _run(worker)

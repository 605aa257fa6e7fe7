# SPDX-License-Identifier: Apache-2.0
"""Run a command in its own process group, folder and environment, and collect the end of its output."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...core.waits.threads import made_in_executor

KEPT_BYTES = 1 << 16
"""Of each stream: the end of the output."""
KILL_S = 5.0
"""Seconds that a killed command gets to disappear."""
DRAIN_S = 1.0
"""Seconds to wait for the end of the output of a command that has ended: a process that left its group may
keep a pipe open."""
PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of the run that a command gets. All others, such as keys and tokens, it does not.

Nor LD_LIBRARY_PATH: packages such as OpenCV change it in the worker, which breaks programs elsewhere."""


class LeftBehind:
    """Counts what could not be ended."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int) -> None:
        """Count some more."""
        self._count += count

    def newly(self) -> int:
        """Return how many there are since the last call."""
        count, self._count = self._count, 0
        return count


class Finished(NamedTuple):
    """A command that has ended."""

    status: int
    stdout: str
    """Its end."""
    stderr: str
    """Its end."""

    def describe(self) -> str:
        """Describe how it ended, with the last lines that it wrote."""
        last = [line for line in (self.stderr or self.stdout).splitlines() if line.strip()][-3:]
        how = f"exit status {self.status}"
        if self.status > 128:
            with suppress(ValueError):
                how = f"killed by {signal.Signals(self.status - 128).name}"
        return how + (f": {' | '.join(last)}" if last else "")

    def last_object(self) -> dict[str, Any] | None:
        """Return the JSON object in the last line of its output, or None if that is something else."""
        lines = [line for line in self.stdout.splitlines() if line.strip()]
        try:
            found = json.loads(lines[-1]) if lines else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command: what is passed of the run's, and what is added."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {**passed, **added}


async def run_command(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    log: OutputLog | None = None,
    left: LeftBehind | None = None,
    mounts: Mapping[str, Sequence[str]] | None = None,
    in_memory: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command until it ends. If cancelled, it is killed with everything that it started.

    `log` gets its output as it arrives; `left` counts processes that left its process group and still run;
    `mounts` makes its sandbox, if it has one; `in_memory` has further variables, each for a file with this
    text, a descriptor that only the command inherits. Raises OSError if the guard cannot be started. A
    command that cannot be started has the status 127, and 125 without the sandbox that it should have.
    """
    loop = asyncio.get_running_loop()
    guard = await made_in_executor(lambda: _Guard(command, cwd, env, mounts, in_memory), _Guard.end)
    process = guard.process
    transports: list[asyncio.BaseTransport] = []
    try:
        tails = [_Tail(loop, log), _Tail(loop, log)]
        for stream, tail in zip((process.stdout, process.stderr), tails, strict=True):
            assert stream is not None
            transports.append((await loop.connect_read_pipe(lambda tail=tail: tail, stream))[0])  # type: ignore[misc]
        status = await _ended(process)
        await asyncio.wait([tail.closed for tail in tails], timeout=DRAIN_S)
        return Finished(status, *(tail.text() for tail in tails))
    finally:
        for transport in transports:
            transport.close()
        if process.returncode is None:
            # It also ends if this is cancelled again.
            count = await asyncio.shield(loop.run_in_executor(None, guard.end))
        else:
            count = guard.end()
        if left is not None:
            left.add(count)


def try_command(command: Sequence[str], mounts: Mapping[str, Sequence[str]], timeout_s: float) -> Finished:
    """Run a command that writes little in a sandbox, and block meanwhile.

    Raises OSError if the guard cannot be started, and subprocess.TimeoutExpired.
    """
    guard = _Guard(command, Path("/"), environment({}), mounts)
    process = guard.process
    try:
        status = process.wait(timeout_s)
        assert process.stdout is not None and process.stderr is not None
        return Finished(status, process.stdout.read().decode(), process.stderr.read().decode())
    finally:
        guard.end()


class _Guard:
    """The guard of a command, and the pipes to it. Its methods block."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        mounts: Mapping[str, Sequence[str]] | None,
        in_memory: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. Raises OSError."""
        spec = {"command": list(command), "cwd": str(cwd), "env": dict(env), "mounts": mounts}
        spec["in_memory"] = dict(in_memory or {})
        lifeline, self._lifeline = os.pipe()
        self._reported, report = os.pipe()
        os.set_blocking(self._reported, False)
        file = Path(__file__).with_name("command_process.py")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(file), str(lifeline), str(report)],
                pass_fds=(lifeline, report),
                env={},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except BaseException:
            os.close(self._lifeline)
            os.close(self._reported)
            raise
        finally:
            os.close(lifeline)
            os.close(report)
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(spec).encode())
            stdin.close()

    def end(self) -> int:
        """End it, and the command if that is still running.

        Returns how many processes have left its group and still run.
        """
        os.close(self._lifeline)
        try:
            self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            # The guard is stuck; the kernel kills the command with it.
            self.process.kill()
            self.process.wait()
        # It reports nothing if it was killed.
        found = b""
        with suppress(BlockingIOError):
            found = os.read(self._reported, 16)
        os.close(self._reported)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return int(found or 0)


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status, without a thread for each process."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pid = os.pidfd_open(process.pid)

    def settle() -> None:
        loop.remove_reader(pid)
        ended.set_result(None)

    loop.add_reader(pid, settle)
    try:
        await ended
    finally:
        loop.remove_reader(pid)
        os.close(pid)
    return process.wait()


class _Tail(asyncio.Protocol):
    """Keeps the end of a stream, and passes it on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: OutputLog | None) -> None:
        self._data, self._log = bytearray(), log
        self.closed: asyncio.Future[None] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._log is not None:
            self._log.write(data)
        if len(self._data) > 2 * KEPT_BYTES:
            del self._data[:-KEPT_BYTES]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def text(self) -> str:
        return bytes(self._data[-KEPT_BYTES:]).decode(errors="replace")


HEAD_BYTES, TAIL_BYTES = 1 << 14, 3 << 14
"""How much is kept of the beginning and of the end of the output of one attempt."""


class OutputLog:
    """The output of one attempt, in the order in which it arrived.

    agent, verify ──pipes──► OutputLog ──► the attempt failed: FailedAttempt ──► file of the run directory
                                      └──► otherwise it is forgotten
    """

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append output."""
        self._size += len(data)
        room = HEAD_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def text(self) -> str:
        """Return it, with a line that says how much is missing in the middle, if anything is."""
        tail = bytes(self._tail[-TAIL_BYTES:])
        missing = self._size - len(self._head) - len(tail)
        gap = f"\n[... {missing} bytes are not kept ...]\n".encode() if missing else b""
        return (bytes(self._head) + gap + tail).decode(errors="replace")

# SPDX-License-Identifier: Apache-2.0
"""Two hosts on this machine: Ray nodes with separate networks and separate shared memory. Requires root.

For jobs whose hosts share nothing but the file system and the processors.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...errors import ConfigError
from ...processes import SLOW_START, repeat_slow_start
from ...weight_sync.memory.segment_names import PREFIX
from ..job import with_cpu_settings
from .inputs.workload import CONFIGS
from .measuring.host_memory import BLOCK
from .runner import JobFailed

PORT = 6399
LIMIT_S = 120.0
"""Deadline of a command that sets up a host, such as the start of its Ray node."""
SHM_SIZE = "4g"
"""Shared memory of each host."""
WAIT_S = 0.2
"""Interval for looking whether a host has come up."""
_KEPT = "kept free"
"""Name of the placement group that occupies the second host."""
_OCCUPY = f"""
import ray
ray.init(address="auto", namespace="two hosts", log_to_driver=False)
group = ray.util.placement_group([{{"CPU": 64, "second_host": 1}}], name="{_KEPT}", lifetime="detached")
ray.get(group.ready(), timeout=60)
"""
_RELEASE = f"""
import ray
ray.init(address="auto", namespace="two hosts", log_to_driver=False)
ray.util.remove_placement_group(ray.util.get_placement_group("{_KEPT}"))
"""


class Host:
    """A network with one address, private shared memory, and the Ray node in them."""

    def __init__(self, number: int, environment: Mapping[str, str]) -> None:
        """Create the namespaces. Raises ConfigError if this user must not."""
        self.address = f"10.77.0.{number}"
        # Nodes of one machine would otherwise share the sockets of their sessions.
        own = {"RAY_ADDRESS": f"{self.address}:{PORT}", "RAY_TMPDIR": "/tmp"}
        self._environment = {**os.environ, **own, **environment}
        script = (
            f"mount -t tmpfs -o size={SHM_SIZE} tmpfs /dev/shm && mkdir -p /tmp/ray "
            "&& mount -t tmpfs tmpfs /tmp/ray && ip link set lo up && echo ready && exec sleep infinity"
        )
        self._holder = subprocess.Popen(
            ["unshare", "-m", "-n", "bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal to this process's group must not reach it
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            why = self._holder.communicate()[1].strip()
            raise ConfigError(
                f"two hosts need namespaces, which this user must not create: {why}; run as root"
            )
        self.pid = self._holder.pid
        self._network = os.readlink(f"/proc/{self.pid}/ns/net")
        self._ended = False
        """Whether all of its processes have ended: its namespaces are gone, and their ids can be reused."""

    @property
    def prefix(self) -> list[str]:
        """The command that runs other commands on this host."""
        return ["nsenter", "-t", str(self.pid), "-m", "-n", f"--wd={CONFIGS.parent}"]

    def run(self, *command: str) -> None:
        """Run a command to its end, with the CPU settings of jobs. Raises JobFailed if it fails or takes
        longer than `LIMIT_S`.
        """
        try:
            done = subprocess.run(
                [*self.prefix, *with_cpu_settings(command)],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env=self._environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise JobFailed(f"{command[0]} on {self.address} {SLOW_START} after {LIMIT_S:g} s") from None
        if done.returncode:
            raise JobFailed(f"{command[0]} on {self.address}: {(done.stdout + done.stderr)[-2000:]}")

    def segments(self) -> dict[str, int]:
        """Return the bytes of each file of this package in shared memory."""
        shared = Path(f"/proc/{self.pid}/root/dev/shm")
        return {path.name: path.stat().st_blocks * BLOCK for path in shared.glob(f"{PREFIX}*")}

    def start_ray(self, *options: str) -> None:
        """Start a Ray node. Raises JobFailed if it fails, or is too slow each time."""
        command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=64", *options)
        repeat_slow_start(lambda: self.run(*command), lambda error: self.end_processes())

    def lose(self) -> None:
        """Cut its network first, so that no process can say goodbye, then kill all of its processes."""
        if self._ended:
            return
        self._ended = True
        if not self.is_lost:
            with suppress(JobFailed):
                self.run("ip", "link", "set", "pipeline0", "down")
        self.end_processes()
        self.end_processes()  # which can have begun during the first search
        self._holder.kill()
        self._holder.communicate()

    def end_processes(self) -> None:
        """Kill all of its processes, except for the one that keeps its namespaces."""
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, title: str = "") -> set[int]:
        """Return the ids of its processes with a title that begins so, without the one that keeps its
        namespaces.
        """
        found = set()
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != self.pid:
                with suppress(OSError):
                    if os.readlink(process / "ns" / "net") == self._network:
                        if (process / "cmdline").read_bytes().startswith(title.encode()):
                            found.add(int(process.name))
        return found

    @property
    def is_lost(self) -> bool:
        return self._holder.poll() is not None


class TwoHosts:
    """A cluster of two hosts; the first has the head node, and a job starts there."""

    def __init__(self, first: int, second: int, environment: Mapping[str, str] | None = None) -> None:
        """Start both, with so many devices. Nothing that asks for a CPU gets onto the second before
        `release`. Processes of both inherit `environment`.

        Raises ConfigError if this user must not create namespaces, JobFailed if Ray does not start.
        """
        # Otherwise each command on the other host would have to present the token of the cluster.
        settings = {**(environment or {}), "RAY_AUTH_MODE": "disabled"}
        self.first = Host(1, settings)
        try:
            self.second = Host(2, settings)
        except BaseException:
            self.first.lose()
            raise
        try:
            self._connect()
            self._start_ray(first, second)
        except BaseException:
            self.close()
            raise
        self.environment = settings
        self.overrides = [
            f"++ray_kwargs.ray_init.address={self.first.address}:{PORT}",
            "ray_kwargs.ray_init.num_gpus=null",
            "ray_kwargs.ray_init.num_cpus=null",
            "~ray_kwargs.ray_init.include_dashboard",
            # The sample store must not be on a host that may be lost.
            "+transfer_queue.backend.SimpleStorage.required_node_resource=node:__internal_head__",
        ]
        """Settings of a job on these hosts."""

    def _start_ray(self, first: int, second: int) -> None:
        self.first.start_ray(
            "--head",
            f"--port={PORT}",
            f"--node-ip-address={self.first.address}",
            f"--num-gpus={first}",
            "--include-dashboard=false",
        )
        self.start_second(second)
        self.first.run(sys.executable, "-c", _OCCUPY)

    def start_second(self, devices: int) -> None:
        """Start the Ray node of the second host, also after `Host.end_processes`."""
        self.second.start_ray(
            f"--address={self.first.address}:{PORT}",
            f"--node-ip-address={self.second.address}",
            f"--num-gpus={devices}",
            '--resources={"second_host": 1}',
        )

    def _connect(self) -> None:
        first, second = (("netns", str(host.pid)) for host in (self.first, self.second))
        link = ["ip", "link", "add", "pipeline0", *first, "type", "veth"]
        subprocess.run([*link, "peer", "name", "pipeline0", *second], check=True)
        for host in (self.first, self.second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "pipeline0")
            host.run("ip", "link", "set", "pipeline0", "up")

    def release(self) -> None:
        """Let the job use the second host."""
        self.first.run(sys.executable, "-c", _RELEASE)

    def release_after(self, text: str, log: Path) -> None:
        """Wait until a log contains a text, then let the job use the second host. Has no deadline."""
        while not log.is_file() or text not in log.read_text(encoding="utf-8", errors="replace"):
            if self.first.is_lost:
                return
            time.sleep(WAIT_S)
        self.release()

    def close(self) -> None:
        """End both hosts and all of their processes."""
        for host in (self.second, self.first):
            host.lose()

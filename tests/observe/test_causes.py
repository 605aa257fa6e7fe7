# SPDX-License-Identifier: Apache-2.0
"""Ways for a run to die, each with the line about its cause. The errors are real, most from Ray's workers."""

from __future__ import annotations

import asyncio
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from hydra.utils import instantiate
from ray.exceptions import ObjectLostError, OutOfMemoryError

from recipe.async_pipeline.core.waits.deadline import within
from recipe.async_pipeline.errors import ConfigError, PatchError
from recipe.async_pipeline.observe.causes import causes, one_line
from recipe.async_pipeline.observe.table import MARK
from recipe.async_pipeline.verl_bridge.calls.ray_calls import got
from recipe.async_pipeline.verl_bridge.process.user_modules import as_python_does
from recipe.async_pipeline.verl_bridge.reward.executor import FunctionLocation, Limits, RewardGuard
from tests import HANG_S
from tests.fakes.ray_nodes import start_ray
from tests.observe import ways_to_die

pytestmark = pytest.mark.real_engine

MODULE = ways_to_die.__name__
FILE = Path(ways_to_die.__file__)
LINES = FILE.read_text(encoding="utf-8").splitlines()
ACTOR: Any = ray.remote(num_cpus=0)(ways_to_die.Worker)
SHARED: list[Any] = []
"""Actors in which several rows raise."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_ray()
    SHARED.extend(ACTOR.remote() for _ in range(2))
    yield
    SHARED.clear()
    ray.shutdown()


def wait(ref: Any, timeout_s: float = HANG_S) -> Any:
    return got(ref, timeout_s, owner="train", what="its workers")


# Where the ways are gone.


def in_method(way: str) -> None:
    wait(SHARED[0].die.remote(way))


def in_last_method(way: str) -> None:
    wait(ACTOR.remote().die.remote(way))


def in_constructor(way: str) -> None:
    wait(ACTOR.remote(way).die.remote("ended"))


def in_task(way: str) -> None:
    wait(ray.remote(num_cpus=0, max_retries=0)(getattr(ways_to_die, way)).remote())


def in_task_of_a_method() -> None:
    wait(SHARED[0].die.remote("in_other_worker", SHARED[1], "without_key"))


def in_process(way: str) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(getattr(ways_to_die, way)).result()


def in_reward_process(way: str) -> None:
    limits = Limits(timeout_s=HANG_S, attempts=1, concurrency=1)
    guard = RewardGuard(FunctionLocation(str(FILE), way, {}), limits)
    try:
        asyncio.run(guard.score(data_source="toy", solution_str="4", ground_truth="4", extra_info={}))
    finally:
        guard.close()


def in_file(text: str) -> None:
    Path("reward.py").write_text(text, encoding="utf-8")
    as_python_does(lambda *_: None)("reward.py")


def killed_by_ray() -> None:
    actor = ACTOR.remote()
    ray.kill(actor)
    wait(actor.die.remote("ended"))


def raised(error: Exception) -> None:
    raise error


def deadline() -> None:
    never: Any = asyncio.Event().wait
    asyncio.run(within(never(), 0.01, owner="logp", what="a batch"))


def at(text: str) -> str:
    """Return the place of the only line of the user's code that contains a text."""
    (number,) = (number for number, line in enumerate(LINES, 1) if text in line)
    return f"at {FILE}:{number}"


LOGS = "its last lines are in session_latest/logs of Ray's temporary folder"
KILLED = f"its process was killed (`dmesg` of its node tells if memory was full) or crashed; {LOGS}"
MEMORY = (
    "its node has less free memory: request less there, or use fewer workers, shorter sequences or more nodes"
)
DISK = (
    "free some space, or set trainer.default_local_dir, trainer.v1.async_pipeline.run_dir or TMPDIR to "
    "another disk"
)
SMALLER = (
    "lower ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu of its worker, or "
    "actor_rollout_ref.rollout.gpu_memory_utilization of an engine"
)
DIED = "ActorDiedError: The actor died unexpectedly before finishing this task. "
CRASHED = f"{DIED}Worker unexpectedly exits with a connection error code 2. End of file, in Worker; {KILLED}"
JUDGE, JUDGE_AT = "ValueError: the judge fell asleep at noon and snores", at("fell asleep")
NO_FILE, FILE_AT = "FileNotFoundError: [Errno 2] No such file or directory: 'tools.yaml'", at("read_text")
KEY_AT = at('["reward"]')
NO_KEY = f"KeyError: 'reward', in Worker.die, {KEY_AT}"
OF_RAY = "Task was killed due to the node running low on memory.\nIt had 62.1GB / 62.8GB (0.98)."

WAYS: dict[str, tuple[Callable[[], object], str]] = {
    "a constructor raises": (
        partial(in_constructor, "without_file"),
        f"{NO_FILE}, in Worker.__init__, {FILE_AT}",
    ),
    "a constructor ends its process": (partial(in_constructor, "ended"), CRASHED),
    "a message of several lines": (
        partial(in_method, "with_several_lines"),
        f"{JUDGE}, in Worker.die, {JUDGE_AT}",
    ),
    "a missing key": (partial(in_method, "without_key"), NO_KEY),
    "an error that cannot be pickled": (
        partial(in_method, "unpicklable"),
        f"{MODULE}.Unpicklable: the lock is held, in Worker.die, {at('the lock')}",
    ),
    "an error that cannot be unpickled": (
        partial(in_method, "two_arguments"),
        f"{MODULE}.TwoArguments: search returned 500, in Worker.die, {at('raise TwoArguments')}",
    ),
    "an error with another as its cause": (
        partial(in_method, "chained"),
        f"RuntimeError: no tools for the policy (from {NO_FILE}), in Worker.die, {FILE_AT}",
    ),
    "an error in the handling of another": (partial(in_method, "while_handling"), NO_KEY),
    "a group of errors": (
        partial(in_method, "grouped"),
        f"ValueError: a judge is missing, {at('raise group')}",
    ),
    "a future in a thread": (partial(in_method, "in_thread"), NO_KEY),
    "a timeout without a message": (
        partial(in_method, "too_late"),
        f"TimeoutError, in Worker.die, {at('wait_for')}",
    ),
    "too little memory": (
        partial(in_method, "out_of_memory"),
        f"MemoryError, in Worker.die, {at('bytearray')}; {MEMORY}",
    ),
    "a full disk": (
        partial(in_method, "full_disk"),
        f"OSError: [Errno 28] No space left on device, in Worker.die, {at('/dev/full')}; {DISK}",
    ),
    "Ctrl-C in a worker": (
        partial(in_method, "interrupted"),
        f"TaskCancelledError: Task: TaskID(*) was cancelled, in Worker.die, {at('raise KeyboardInterrupt')}",
    ),
    "an error of a worker's worker": (in_task_of_a_method, NO_KEY),
    "SIGKILL": (partial(in_last_method, "killed"), CRASHED),
    "sys.exit": (
        partial(in_last_method, "exited"),
        f"{DIED}Worker exits unexpectedly. Worker exits with an exit code the licence has expired, in "
        f"Worker; {LOGS}",
    ),
    "ray.kill": (
        killed_by_ray,
        f"{DIED}The actor is dead because it was killed by `ray.kill`, in Worker; {LOGS}",
    ),
    "a task raises without a message": (
        partial(in_task, "without_a_message"),
        f"NotImplementedError, in without_a_message, {at('raise NotImpl')}",
    ),
    "SIGKILL in a task": (
        partial(in_task, "killed"),
        "WorkerCrashedError: The worker died unexpectedly while executing this task. Check "
        f"python-core-worker-*.log files for more information; {KILLED}",
    ),
    "a lost object": (
        lambda: raised(ObjectLostError("00ff", None, "")),
        "ObjectLostError: Failed to retrieve object 00ff. *, at *; a process or node has ended; the same "
        "command resumes from the last checkpoint",
    ),
    "a process of a pool raises": (
        partial(in_process, "without_key"),
        f"KeyError: 'reward', {KEY_AT}",
    ),
    "SIGKILL in a process of a pool": (
        partial(in_process, "killed"),
        "BrokenProcessPool: A process in the process pool was terminated abruptly while the future was "
        f"running or pending, at *; {KILLED}",
    ),
    "a reward function raises": (
        partial(in_reward_process, "with_several_lines"),
        f"RewardError: raised: with_several_lines: {JUDGE}, {JUDGE_AT}",
    ),
    "SIGKILL in a reward function": (
        partial(in_reward_process, "killed"),
        f"RewardError: died: killed: ProcessExpired: Abnormal termination; {KILLED}",
    ),
    "a file that imports what is missing": (
        partial(in_file, "import os\nimport sandbox_of_mine\n"),
        "RuntimeError: reward.py cannot be loaded: ModuleNotFoundError: No module named 'sandbox_of_mine', "
        "at */reward.py:2; install it in the environment of each node",
    ),
    "a file that is not Python": (
        partial(in_file, "def score(:\n"),
        "RuntimeError: reward.py cannot be loaded: SyntaxError: invalid syntax (reward.py, line 1), at "
        "*/reward.py:1",
    ),
    "a deadline on the event loop": (deadline, "WaitTimeout: logp waited 0.01 s for a batch"),
    "a deadline in a thread": (
        lambda: wait(SHARED[1].die.remote("hangs"), 0.1),
        "WaitTimeout: train waited 0.1 s for its workers",
    ),
    "a deadline of Ray": (
        lambda: ray.get(SHARED[1].die.remote("hangs"), timeout=0.1),
        f"GetTimeoutError: Get timed out: some object(s) not ready, at {__file__}:*",
    ),
    "the memory of a device": (
        lambda: raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        f"OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB, at *; {SMALLER}",
    ),
    "an allocation of torch": (
        lambda: torch.empty(1 << 60),
        f"RuntimeError: * can't allocate memory: you tried to allocate * bytes. *, at *; {MEMORY}",
    ),
    "Ray's limit of memory": (
        lambda: raised(OutOfMemoryError(OF_RAY)),
        "OutOfMemoryError: Task was killed due to the node running low on memory. It had 62.1GB "
        f"/ 62.8GB (0.98), at *; {MEMORY}",
    ),
    "an object of hydra": (
        lambda: instantiate({"_target_": f"{MODULE}.without_key"}),
        f"InstantiationException: Error in call to target '{MODULE}.without_key': KeyError('reward'), "
        f"{KEY_AT}",
    ),
}


def cause_of(make: Callable[[], object]) -> BaseException:
    """Return what `make` raises."""
    try:
        make()
    except BaseException as error:  # noqa: BLE001  SystemExit is a way to die
        return error
    raise AssertionError("it survives")


@pytest.mark.parametrize("way", WAYS)
def test_the_cause_is_one_line(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, expected = WAYS[way]
    if "group" in way and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no groups")
    line = one_line(cause_of(make))
    assert re.fullmatch(".*".join(map(re.escape, expected.split("*"))), line), line
    assert len(line) <= 500


def test_the_stage_is_named() -> None:
    error = ValueError("no gradient")
    vars(error)["stage"] = "train"
    assert one_line(error) == "ValueError: no gradient, in stage train"


@pytest.mark.parametrize(
    "error", [ConfigError("a.b must be 1", "c must be 2"), PatchError("verl is diverged")]
)
def test_an_error_for_the_user_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with pytest.raises(type(error)), causes():
        raise error
    first, *more = str(error).splitlines()
    assert capsys.readouterr().out.splitlines() == [
        f"{MARK} cause: {first}",
        *(f"{MARK} {line}" for line in more),
    ]


def test_a_cause_is_printed_once_by_all_processes_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError) as caught, causes(), causes():
        in_method("without_key")
    assert capsys.readouterr().out == f"{MARK} cause: {NO_KEY}\n"
    with pytest.raises(KeyError), causes():
        raise pickle.loads(pickle.dumps(caught.value.cause))  # type: ignore[attr-defined]
    assert capsys.readouterr().out == ""


def test_ctrl_c_is_no_cause(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(asyncio.CancelledError), causes():
        raise asyncio.CancelledError
    assert capsys.readouterr().out == ""


def test_a_full_disk_of_the_output_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.stdout, "write", fails)
    with pytest.raises(KeyError), causes():
        raise KeyError("the real error")


def test_a_reward_worker_that_died_has_the_knob_for_it() -> None:
    kind = type("ActorDiedError", (Exception,), {})
    died = kind("The actor died.\n\tclass_name: PlainRewardLoopWorker\n")
    assert one_line(died) == (
        "ActorDiedError: The actor died, in PlainRewardLoopWorker; with trainer.v1.async_pipeline.reward."
        f"timeout_s, a reward function that ends its process ends no run; {KILLED}"
    )

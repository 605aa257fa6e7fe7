# SPDX-License-Identifier: Apache-2.0
"""Describe what ended a run on one line: the error, its worker and stage, the user's code or a remedy.

Ray, pools of processes and groups wrap an error. Of errors in other processes, most keep only the text of the
traceback.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import format_exception

from ..console import echo
from ..errors import AsyncPipelineError, ConfigError, PatchError
from .table import marked

_LONGEST_MESSAGE = 300
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_BARS = re.compile(r"^ *(?:\| ?|\+[-+].*\n)", re.MULTILINE)
"""What a traceback prints around the errors of a group."""
_TRACEBACK = re.compile(r"^(?:Traceback \(most |.*\bray::\S+\(.*\(pid=).*\n?", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(.+?)", line (\d+).*\n?', re.MULTILINE)
_DIRECT, _DURING = (
    "\nThe above exception was the direct cause of the following exception:\n",
    "\nDuring handling of the above exception, another exception occurred:\n",
)
_WORKER = re.compile(r"\bray::([^\s()]+)\(|^\s+class_name: (\S+)", re.MULTILINE)
"""The method of an actor, the function of a task, or the class of an actor that has died."""
_OF_RAY = re.compile(
    r"^\s+(?:class_name|actor_id|pid|name|namespace|ip): .*\n|^.* exit detail: |"
    r" (?:Some common causes|There are some potential root causes).*$|^The actor never ran.*$",
    re.MULTILINE,
)
"""What Ray writes about a dead actor besides the reason."""
_LIBRARY = re.compile(r"/lib(?:64)?/python3|/(?:site|dist)-packages/|^[^/]")
_LOGS = "its last lines are in session_latest/logs of Ray's temporary folder"
_REMEDIES = {
    r"\b(?:CUDA|HIP|NPU) out of memory": "lower ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu "
    "of its worker, or actor_rollout_ref.rollout.gpu_memory_utilization of an engine",
    r"MemoryError|allocate memory|low on memory": "its node has less free memory: request less there, or use "
    "fewer workers, shorter sequences or more nodes",
    r"No space left|quota exceeded|OutOfDiskError": "free some space, or set trainer.default_local_dir, "
    "trainer.v1.async_pipeline.run_dir or TMPDIR to another disk",
    r"ModuleNotFoundError|ImportError": "install it in the environment of each node",
    r"EngineDeadError(?!: the fork server)|Engine core": "the first error of EngineCore above has the reason",
    r"exit code|by `ray.kill`": _LOGS,
    r"ActorDiedError|WorkerCrashedError|ProcessExpired|BrokenProcessPool": "its process was killed (`dmesg` "
    f"of its node tells if memory was full) or crashed; {_LOGS}",
    r"Object\w+Error|OwnerDied|NodeDied|ActorUnavailable": "a process or node has ended; the same command "
    "resumes from the last checkpoint",
}

_SCORES = "RewardLoopWorker"
_OWN_PROCESS = (
    "with trainer.v1.async_pipeline.reward.timeout_s, a reward function that ends its process ends no run; "
)


@contextmanager
def causes() -> Iterator[None]:
    """Print the cause on one line if the run ends here, above the traceback that Ray prints, and raise it.

    An error is printed once, also if it passes further blocks, in this process or in the driver's.
    """
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        if "told" not in vars(reason):
            vars(reason)["told"] = True  # pickled with the error
            cause = str(reason) if isinstance(reason, ConfigError | PatchError) else one_line(error)
            with suppress(OSError):  # the disk of the output may be the one that is full
                echo(marked(f"cause: {cause}"))
        raise


def reason_of(error: BaseException) -> BaseException:
    """Return the error within the wrappers of Ray, and the first of a group."""
    inner = next(iter(getattr(error, "exceptions", ())), None)
    if inner is None and _is_traceback(str(error)):
        inner = getattr(error, "cause", None)
    return reason_of(inner) if isinstance(inner, BaseException) else error


def one_line(error: BaseException) -> str:
    """Return type and message of the innermost error, its worker and stage, and its place or a remedy.

    At most 500 characters. `error.stage`, if there is one, is the stage of the pipeline that raised it.
    """
    reason = reason_of(error)
    # A traceback of a group lacks what Ray writes.
    text = "".join([*format_exception(error), f"\n{error}"])
    text = _BARS.sub("", _COLOUR.sub("", text).rpartition(_DURING)[2])
    what, is_ours = _described(reason), isinstance(reason, AsyncPipelineError)
    root = _last_error(text.partition(_DIRECT)[0])
    if _DIRECT in text and not is_ours and root.partition(": ")[2] not in what:
        what += f" (from {root[:_LONGEST_MESSAGE]})"

    workers, stage = _WORKER.findall(text), vars(error).get("stage", "")
    worker = next((method or actor for method, actor in workers[-1:]), "")
    parts = [what, *([f"in {worker}"] if worker else [])]
    if stage:
        parts.append(f"in stage {stage}")
    users, deepest = _places(text)
    remedy = next((remedy for kind, remedy in _REMEDIES.items() if re.search(kind, what)), "")
    if _SCORES in worker and "ActorDiedError" in what:
        remedy = f"{_OWN_PROCESS}{remedy}"
    if place := users or (deepest if not remedy and not is_ours else ""):
        parts.append(f"at {place}")
    return (", ".join(parts) + (f"; {remedy}" if remedy else ""))[:500]


def _is_traceback(text: str) -> bool:
    return bool(_FRAME.search(text) or _TRACEBACK.search(_COLOUR.sub("", text)))


def _described(reason: BaseException) -> str:
    text = _COLOUR.sub("", str(reason))
    name = type(reason).__name__
    if _is_traceback(text):
        return _last_error(text)[:_LONGEST_MESSAGE]
    message = " ".join(_OF_RAY.sub("", text).split())
    return (f"{name}: {message}" if message else name)[:_LONGEST_MESSAGE].rstrip(".")


def _last_error(text: str) -> str:
    """Return type and message of the error at the end of a traceback, on one line."""
    begins = [found.end() for found in (*_FRAME.finditer(text), *_TRACEBACK.finditer(text))]
    lines = text[max(begins, default=0) :].replace('"""', "").splitlines()
    while lines and (not lines[0] or lines[0][0].isspace()):
        del lines[0]  # of the frame
    return " ".join(" ".join(lines).split())


def _places(text: str) -> tuple[str, str]:
    """Return file and line of the user's code that raised, and of the deepest code outside of libraries."""
    verl = getattr(sys.modules.get("verl"), "__path__", [])
    packages = tuple(f"{folder}/" for folder in (Path(__file__).resolve().parents[1], *verl))
    found = list[str]()
    for part in text.split(_DIRECT):
        for block in reversed(_TRACEBACK.split(part)):
            frames = [frame for frame in _FRAME.findall(block) if not _LIBRARY.search(frame[0])]
            if frames:
                found.append(":".join(frames[-1]))
    users = [place for place in found if not place.startswith(packages)]
    return ([*users, ""])[0], ([*found, ""])[0]

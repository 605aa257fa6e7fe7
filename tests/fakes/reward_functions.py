# SPDX-License-Identifier: Apache-2.0
"""Reward functions that misbehave, as the response says. Loaded by path, in separate processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class TwoArguments(Exception):
    """One that pickle takes and does not give back."""

    def __init__(self, text: str, other: int) -> None:
        super().__init__(text)


UNUSUAL = {
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt("now"),
    "cancel": asyncio.CancelledError("mine"),
    "stop": StopIteration("no more"),
    "close": GeneratorExit("done"),
    "two": TwoArguments("first", 2),
}


@dataclass
class Rubric:
    """Its annotations are texts, which dataclasses look up in the module that has the class."""

    bonus: float = 0.5

    def points(self, word: str) -> float:
        return len(word) + self.bonus


def in_processes(solution_str: str, **_: Any) -> float:
    """`executor`, `spawn` or `process`: the way to start a process that calls a function of this file."""
    if solution_str == "process":
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_send_points, args=(sender, solution_str))
        process.start()
        sender.close()
        try:
            return float(receiver.recv())
        finally:
            process.join()
    context = multiprocessing.get_context("spawn" if solution_str == "spawn" else "fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(Rubric().points, solution_str).result()


def _send_points(sender: Connection, word: str) -> None:
    sender.send(Rubric().points(word))


def one(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], *, bonus: float = 0.0
) -> Any:
    """`hog`, `die`, `eat`, `limits`, `raise`, `none`, `nan`, `text`, `dict`, `once FILE`; anything
    else is right or wrong.
    """
    del data_source, extra_info
    word, _, rest = solution_str.partition(" ")
    if word == "hog":
        while True:
            pass
    if word == "die":
        os._exit(3)
    if word == "once" and not Path(rest).exists():
        Path(rest).touch()
        time.sleep(60)
    if word == "eat":
        bytearray(4 << 30)
    if word == "limits":
        return float(resource.getrlimit(resource.RLIMIT_CORE)[0])
    if word == "raise":
        raise ValueError("no such rule")
    odd = {
        "none": None,
        "nan": float("nan"),
        "text": "1",
        "dict": {"score": 0.5, "acc": 1},
        "pid": float(os.getpid()),
    }
    return odd[word] if word in odd else float(solution_str == ground_truth) + bonus


def strange(solution_str: str, **_: Any) -> Any:
    """Raises what the answer names, returns `code`, or starts a program that outlives it: `start FILE`.
    Anything else is right.
    """
    word, _sep, rest = solution_str.partition(" ")
    if word in UNUSUAL:
        raise UNUSUAL[word]
    if word == "start":
        Path(rest).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(60)
    return (lambda: 1.0) if word == "code" else 1.0


async def unusual(solution_str: str, **_: Any) -> float:
    """Raises what the answer names, or waits for as long as it says."""
    if solution_str in UNUSUAL:
        raise UNUSUAL[solution_str]
    await asyncio.sleep(float(solution_str))
    return 1.0


async def service(solution_str: str, **_: Any) -> float:
    """Answers after as many seconds as the answer says."""
    await asyncio.sleep(float(solution_str))
    return 1.0


async def stubborn(solution_str: str, **_: Any) -> float:
    """Waits for as many seconds as the answer says, also if it is cancelled once."""
    try:
        await asyncio.sleep(float(solution_str))
    except asyncio.CancelledError:
        await asyncio.sleep(float(solution_str))
    return 1.0


def plainly(function: Any) -> Any:
    """Decorate as one who does not think of async functions."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@plainly
async def decorated(solution_str: str, **_: Any) -> float:
    """Half a point for an answer of one word, after a while."""
    await asyncio.sleep(0)
    return 0.5 * (len(solution_str.split()) == 1)


async def impatient(solution_str: str, **_: Any) -> float:
    """Gives its service up before the deadline."""
    raise TimeoutError("the service is slow")


async def judged(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    *,
    reward_router_address: str,
    reward_model_tokenizer: Any,
) -> dict[str, float]:
    """Asks a reward model for its own answer, and raises if it says nothing; half a point for having
    asked.
    """
    import aiohttp

    del data_source, extra_info
    asked = {
        "model": reward_model_tokenizer.name_or_path,
        "prompt": "12+34=",
        "max_tokens": 4,
        "temperature": 0,
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        session.post(f"http://{reward_router_address}/v1/completions", json=asked) as reply,
    ):
        reply.raise_for_status()
        said = (await reply.json())["choices"][0]["text"]
    if not said:
        raise ValueError("the reward model said nothing")
    return {"score": 0.5 + 0.5 * (solution_str.strip() == ground_truth), "judge_characters": float(len(said))}


def many(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
) -> Any:
    """All at once; one that says `raise` fails all. Each score is how many there were."""
    del data_sources, extra_infos
    if "raise" in solution_strs:
        raise ValueError("poisoned")
    if "short" in solution_strs:
        return [1.0] * (len(solution_strs) - 1)
    return [len(solution_strs) * float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]


def told(solution_str: str) -> float:
    """Writes its process's number to the file that the answer names, and never comes back."""
    Path(solution_str).write_text(str(os.getpid()))
    while True:
        pass

# SPDX-License-Identifier: Apache-2.0
"""What SGLang has under different names is found; the real classes are in `interface_probe.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.lab.job import with_cpu_settings
from recipe.async_pipeline.verl_bridge.rollout.sglang.calls import (
    log_probs,
    message,
    middle_chunks,
    ranks,
    sender,
)
from tests import REPOSITORY

LIMIT_S = 1500


def test_requests_and_schedulers_of_both_generations() -> None:
    older = SimpleNamespace(is_chunked=2, output_token_logprobs_val=[0.5])
    newer = SimpleNamespace(
        inflight_middle_chunks=1, logprob=SimpleNamespace(output_token_logprobs_val=[0.25])
    )
    assert [middle_chunks(older), middle_chunks(newer)] == [2, 1]
    assert [log_probs(older), log_probs(newer)] == [[0.5], [0.25]]
    assert ranks(SimpleNamespace(tp_cpu_group=SimpleNamespace(size=lambda: 4))) == 4


def test_a_message_goes_through_the_function_that_encodes() -> None:
    sent: list[Any] = []
    socket = SimpleNamespace(send_pyobj=lambda content: sent.append(("pickled", content)))
    older = SimpleNamespace(send_to_scheduler=socket)
    newer = SimpleNamespace(
        send_to_scheduler=socket, _dispatch_to_scheduler=lambda content: sent.append(("encoded", content))
    )
    sender(older)(1)
    sender(newer)(2)
    assert sent == [("pickled", 1), ("encoded", 2)]


def test_a_message_is_wrapped_if_sglang_has_a_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.managers.io_struct")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert message("content") == "content"
    module.wrap_as_pickle = lambda content: ("wrapped", content)  # type: ignore[attr-defined]
    assert message("content") == ("wrapped", "content")


@pytest.mark.real_engine
@pytest.mark.parametrize("pickled", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_the_real_classes_have_what_is_used(pickled: bool) -> None:
    """Of the SGLang that is first on the path: PYTHONPATH can name an unpacked one."""
    if find_spec("sglang") is None:  # without an import, which would leave stubs in this process
        pytest.skip("no sglang")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY)])),
        "VERL_PLATFORM": "cpu",
        "SGLANG_USE_PICKLE_IPC": str(int(pickled)),
    }
    script = Path(__file__).with_name("interface_probe.py")
    done = subprocess.run(
        with_cpu_settings([sys.executable, "-W", "ignore", str(script)]),
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    found = json.loads(line.removeprefix("REPORT "))
    assert found.pop("pickled") in (pickled, True), "older SGLang always pickles"
    assert found == {
        "progress": {"a": 4, "b": 0, "c": 2, "d": 0},
        "written": {"a": [[0, 1, 2], [0.5] * 3], "b": [[], []], "c": [[0, 1], None]},
        "frozen": [None, True],
        "events": ["sent", "noted"],
    }

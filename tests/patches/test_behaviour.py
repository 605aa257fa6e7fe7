# SPDX-License-Identifier: Apache-2.0
"""Each patch does what its header says: its probe passes on a patched tree and fails on a pristine one.

The probes of a tree run in one process (probes.py), the two trees at the same time: importing verl is what
takes long. A probe that passes on the pristine tree too would prove nothing, so that is an error here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.patches import patched_tree, verl_source
from tests import HANG_S, REPOSITORY

pytestmark = pytest.mark.real_engine

PROBES = Path(__file__).with_name("probes.py")

Results = Mapping[str, str | None]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """What every probe said of the pristine and of the patched tree: None, or its error."""
    folder = patches_dir()
    scratch = tmp_path_factory.mktemp("trees")
    stem = verl_source.read_pin(folder).stem
    roots = {name: scratch / name / stem for name in ("pristine", "patched")}
    for root in roots.values():
        root.parent.mkdir()
        verl_source.unpack(verl_source.fetch_sdist(folder), root.parent, top=stem)
    patched_tree.apply(roots["patched"], folder=folder)
    running = {name: _start(root, scratch / f"{name}.json") for name, root in roots.items()}
    try:
        for name, process in running.items():
            output, _ = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, f"the probes of the {name} tree ended with:\n{output[-3000:]}"
    finally:
        for process in running.values():
            process.kill()
    return {name: json.loads((scratch / f"{name}.json").read_text()) for name in roots}


def _start(root: Path, result: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{REPOSITORY}",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Without our plugin, which does some of the patches' work on the CPU platform.
        "VERL_USE_EXTERNAL_PLUGINS": "none",
    }
    environment.pop("VERL_PLATFORM", None)
    command = [sys.executable, "-W", "ignore", str(PROBES), str(root), str(result)]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=result.parent,
    )


def assert_fixed(results: Mapping[str, Results], probe: str, pristine_error: str) -> None:
    """The probe passes on the patched tree and fails on the pristine one, for the reason it is there."""
    assert results["patched"][probe] is None
    before = results["pristine"][probe]
    assert before is not None, f"{probe} passes without the patch"
    assert re.search(pristine_error, before), before


def test_main_ppo_hands_its_config_to_the_pipeline(results: dict[str, Results]) -> None:
    assert_fixed(results, "main_ppo_hands_its_config_over", r"prepare was called with \[\]")
    assert_fixed(results, "main_ppo_registers_the_trainers", "before the strategies were registered")


def test_main_ppo_hands_its_command_line_over(results: dict[str, Results]) -> None:
    assert_fixed(
        results, "main_ppo_hands_its_command_line_over", r"rewrite_command_line was called with \[\]"
    )


def test_main_ppo_lets_the_hooks_wait_for_the_run(results: dict[str, Results]) -> None:
    assert_fixed(results, "main_ppo_lets_the_hooks_wait_for_the_run", r"it did \['run', 'wait'\]")


def test_a_broken_installation_is_named_if_the_switch_is_set(results: dict[str, Results]) -> None:
    assert_fixed(
        results,
        "main_ppo_names_a_broken_installation_if_the_switch_is_set",
        "was ignored without the package",
    )


def test_other_runs_need_nothing_of_this_package(results: dict[str, Results]) -> None:
    assert results["patched"]["main_ppo_runs_without_the_package"] is None
    assert results["pristine"]["main_ppo_runs_without_the_package"] is None
    assert_fixed(
        results, "main_ppo_imports_no_launch_code_without_the_switch", "without the switch are not checked"
    )


def test_verl_reexports_the_public_names(results: dict[str, Results]) -> None:
    assert_fixed(results, "verl_reexports_the_public_names", "No module named 'verl.trainer.ppo.pipeline'")


def test_separate_async_starts_without_hybrid_replicas(results: dict[str, Results]) -> None:
    assert_fixed(results, "separate_async_starts_without_hybrid_replicas", "TypeError.*flush")


def test_sender_raises_when_receiver_dies(results: dict[str, Results]) -> None:
    assert_fixed(
        results, "sender_raises_when_receiver_dies", "TimeoutError: still waiting|sender ended with ZMQError"
    )
    assert_fixed(results, "sender_raises_when_receiver_never_answers", "TimeoutError: still waiting")
    assert_fixed(
        results, "sender_names_the_peer_whose_death_swallowed_a_message", "sender ended with ZMQError"
    )
    assert_fixed(results, "receiver_raises_without_a_sender", "TimeoutError: still waiting")


def test_a_bounded_transfer_still_delivers(results: dict[str, Results]) -> None:
    assert results["patched"]["weights_arrive_whole"] is None
    assert results["pristine"]["weights_arrive_whole"] is None


def test_all_masked_batch_has_zero_loss(results: dict[str, Results]) -> None:
    assert_fixed(results, "all_masked_batch_has_zero_loss", "nan")


def test_loss_of_other_batches_is_unchanged(results: dict[str, Results]) -> None:
    assert results["patched"]["loss_of_a_partly_masked_batch_is_as_published"] is None
    assert results["pristine"]["loss_of_a_partly_masked_batch_is_as_published"] is None


def test_a_value_model_has_the_attention_that_its_config_names(results: dict[str, Results]) -> None:
    assert_fixed(results, "value_model_has_the_attention_of_its_config", "please install trl")

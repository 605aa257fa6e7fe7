# SPDX-License-Identifier: Apache-2.0
"""The doctor on real Ray nodes of this machine, one of them with an environment that lacks this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import ray

from recipe.async_pipeline.errors import ConfigError
from tests import HANG_S, REPOSITORY
from tests.conftest import Load
from tests.fakes.ray_nodes import start_cluster


@pytest.mark.real_engine
@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:1", "got 127.0.0.1:1"), ("nowhere", "must be auto or HOST:PORT"), ("h:x", "got h:x")],
)
def test_a_wrong_address_is_one_line(load: Load, address: str, words: str) -> None:
    module = load("recipe.async_pipeline.tools.cli.findings.node_calls")
    with pytest.raises(ConfigError, match=words):
        module.on_every_node(address, ["-V"], 1.0)


@pytest.mark.real_engine
def test_without_a_cluster_auto_says_how_to_start_one(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("recipe.async_pipeline.tools.cli.findings.node_calls")
    monkeypatch.setattr(module.services, "find_gcs_addresses", set)
    with pytest.raises(ConfigError, match="ray start --head"):
        module.on_every_node("auto", ["-V"], 1.0)


def bare_environment(folder: Path) -> Path:
    """Return the Python of an environment with every package of this one, but not the editable install."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    paths = json.loads(
        subprocess.run(
            [str(python), "-c", "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    # Path files in a folder that a path file names are not read, so editable installs stay invisible.
    Path(paths, "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


@pytest.fixture
def cluster() -> Iterator[Any]:
    made = start_cluster(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.e2e
@pytest.mark.nightly
def test_the_doctor_says_which_node_lacks_the_package(cluster: Any, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "bare")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    second = subprocess.Popen(
        [
            *(str(python), "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}"),
            *("--node-ip-address=127.0.0.2", "--num-cpus=1", "--block"),
        ],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert second.stdout is not None
    try:
        said = list(takewhile(lambda line: "Ray runtime started" not in line, second.stdout))
        assert second.poll() is None, "".join(said)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "recipe.async_pipeline", "doctor"),
                *("--cluster", cluster.address, "--json"),
            ],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
    finally:
        second.terminate()
        second.communicate(timeout=HANG_S)
    assert done.returncode == 2, done.stderr
    rows = json.loads(done.stdout)
    assert len({row["node"] for row in rows}) == 2
    (missing,) = (row for row in rows if row["node"] == "127.0.0.2")
    assert (missing["subject"], missing["verdict"]) == ("async_pipeline", "fail")
    assert "No module named" in missing["detail"] and str(python) in missing["detail"]
    assert {"ok"} == {row["verdict"] for row in rows if row["subject"] in ("ray", "torch", "plugin")}

# SPDX-License-Identifier: Apache-2.0
"""A run starts a Ray cluster, or joins the one that the user names; the other nodes see its directory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.config.placement import Placement, Pool
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.observe.table import MARK
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

ONE_NODE = Placement((Pool("train", ("train",), (1,)), Pool("generate", ("generate",), (1,))))
TWO_NODES = Placement((Pool("train", ("train",), (8, 8)), Pool("generate", ("generate",), (1,))))


@pytest.fixture
def ray_cluster(load: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module on a machine without a running cluster."""
    module = load("recipe.async_pipeline.verl_bridge.launch.ray_cluster")
    running(module, monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return module


def running(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Pretend that these clusters run on this machine."""
    monkeypatch.setattr(module.services, "find_gcs_addresses", lambda: frozenset(addresses))
    monkeypatch.setattr(module.services, "find_bootstrap_address", lambda temp_dir: None)


@pytest.fixture
def cluster() -> Iterator[str]:
    """Yield an address that accepts connections; Ray resolves it to the machine's own address."""
    with socket.create_server(("", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def config(**init: Any) -> DictConfig:
    return OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": 64, "num_gpus": 2, **init}}})


LOCAL = {"ray_kwargs.ray_init.address": "local"}
JOINS = {"ray_kwargs.ray_init.num_cpus": None, "ray_kwargs.ray_init.num_gpus": None}


def test_a_run_starts_a_cluster(ray_cluster: ModuleType) -> None:
    for placement in (ONE_NODE, TWO_NODES):
        assert ray_cluster.choose_cluster(config(), placement) == (
            LOCAL,
            "Ray: starts a new cluster on this machine",
        )


def test_a_run_starts_a_cluster_although_another_one_runs(
    ray_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(ray_cluster, monkeypatch, "10.0.0.1:6379")
    values, line = ray_cluster.choose_cluster(config(), ONE_NODE)
    assert values == LOCAL
    assert line.endswith("; to join the one at 10.0.0.1:6379, set RAY_ADDRESS=auto")
    assert ray_cluster.address_to_join(config()) is None


def test_a_run_on_several_nodes_must_say_which_cluster(
    ray_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(ray_cluster, monkeypatch, "10.0.0.1:6379")
    with pytest.raises(
        ConfigError, match=r"address must be set if .* \(at 10\.0\.0\.1:6379\), got None; set"
    ):
        ray_cluster.choose_cluster(config(), TWO_NODES)
    assert ray_cluster.choose_cluster(config(address="local"), TWO_NODES)[0] == LOCAL


@pytest.mark.parametrize("way", ["variable", "key", "auto", "auto in the variable", "both"])
def test_a_run_joins_the_cluster_that_is_named(
    ray_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, cluster: str, way: str
) -> None:
    running(ray_cluster, monkeypatch, cluster)
    given, environment, address = {
        "variable": (None, cluster, cluster),
        "key": (cluster, "", cluster),
        "auto": ("auto", None, "auto"),
        "auto in the variable": (None, "auto", "auto"),
        "both": ("auto", cluster, cluster),
    }[way]
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    wanted = config() if given is None else config(address=given)
    assert ray_cluster.address_to_join(wanted) == address
    values, line = ray_cluster.choose_cluster(wanted, TWO_NODES)
    assert values == {"ray_kwargs.ray_init.address": address, **JOINS}
    port = cluster.rpartition(":")[2]
    assert line.startswith("Ray: joins the running cluster at ") and f":{port}; " in line
    assert line.endswith("ray_kwargs.ray_init.num_cpus, ray_kwargs.ray_init.num_gpus do not apply")


def test_a_named_new_cluster_wins_over_the_variable(
    ray_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_cluster.choose_cluster(config(address="local"), ONE_NODE)[0] == LOCAL


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (
            "auto",
            "address=auto must name a running Ray cluster, got none: Could not find any .*; start one with",
        ),
        ("nonsense", "address=nonsense must name a running Ray cluster, got none: Invalid address format"),
        ("127.0.0.1:1", r"but 127\.0\.0\.1:1 does not answer \(Connection refused\); start one"),
    ],
)
def test_a_cluster_that_does_not_answer_is_refused(
    ray_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    monkeypatch.setattr(ray_cluster.services, "resolve_ip_for_localhost", lambda host: host)
    with pytest.raises(ConfigError, match=why) as caught:
        ray_cluster.choose_cluster(config(address=address), ONE_NODE)
    assert "\n" not in str(caught.value)


def test_the_trainer_recognizes_the_run_directory(ray_cluster: ModuleType, tmp_path: Path) -> None:
    ray_cluster.mark_run_dir(tmp_path)
    mark = ray_cluster.mark_run_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [mark], "the mark of an earlier start is removed"
    ray_cluster.require_run_dir(tmp_path, mark)
    assert list(tmp_path.iterdir()) == []
    ray_cluster.require_run_dir(tmp_path / "elsewhere", None)


def test_a_run_directory_that_the_trainer_does_not_see_is_refused(
    ray_cluster: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "other disk").mkdir()
    with pytest.raises(
        ConfigError, match=r"run_dir must be on a file system that the nodes .* share, got .*; set"
    ):
        ray_cluster.require_run_dir(tmp_path / "other disk", ray_cluster.mark_run_dir(tmp_path))


@pytest.mark.parametrize(
    ("there", "fits"), [({}, False), ({"GPU": 2.0}, False), ({"GPU": 3.0, "CPU": 1.0}, True)]
)
def test_a_cluster_with_too_few_devices_is_refused(
    ray_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, there: dict[str, float], fits: bool
) -> None:
    monkeypatch.setattr(ray_cluster.ray, "cluster_resources", lambda: there)
    if fits:
        ray_cluster.require_devices("GPU", 3)
        return
    with pytest.raises(
        ConfigError, match=rf"must have 3 devices \(GPU\).*got {int(there.get('GPU', 0))}; add"
    ):
        ray_cluster.require_devices("GPU", 3)


class FakeNode:
    """A node of Ray whose first start is too slow."""

    log: list[str] = []

    def __init__(self) -> None:
        self.log.append("start")
        if self.log == ["start"]:
            raise Exception("The current node timed out during startup. This could happen because")

    def kill_all_processes(self, *, check_alive: bool, allow_graceful: bool, wait: bool) -> None:
        assert wait and not check_alive and not allow_graceful
        self.log.append("end")


def test_a_start_of_ray_that_is_too_slow_is_repeated(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves the processes of the first start behind."""
    module = load("recipe.async_pipeline.verl_bridge.launch.ray_cluster")
    monkeypatch.setattr(module, "Node", FakeNode)
    monkeypatch.setattr(FakeNode, "log", [])
    assert isinstance(module.with_cause(FakeNode)(), FakeNode)
    assert FakeNode.log == ["start", "end", "start"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            Exception("The current node timed out during startup. This could"),
            "the machine was too busy for it; ",
        ),
        (OSError("no route"), "the logs in session_latest/logs of Ray's temporary folder say more"),
    ],
)
def test_a_start_of_ray_that_fails_has_a_line_with_its_cause(
    load: Load, capsys: pytest.CaptureFixture[str], error: Exception, remedy: str
) -> None:
    def init(**arguments: int) -> None:
        assert arguments == {"num_cpus": 1}
        raise error

    with pytest.raises(type(error)):
        load("recipe.async_pipeline.verl_bridge.launch.ray_cluster").with_cause(init)(num_cpus=1)
    said = capsys.readouterr().out
    assert said.startswith(f"{MARK} cause: Ray did not start: {type(error).__name__}: ") and remedy in said

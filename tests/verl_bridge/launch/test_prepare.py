# SPDX-License-Identifier: Apache-2.0
"""Before Ray starts, the config is checked and rewritten, and errors have one line."""

from __future__ import annotations

import atexit
import copy
import fcntl
import io
import os
import re
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.cli.watch import Screen
from recipe.async_pipeline.config.paths import MODE, OWN, PATCH_FREE, walk
from recipe.async_pipeline.errors import ConfigError, PatchedVerlRequired
from recipe.async_pipeline.observe.table import MARK
from recipe.async_pipeline.strategies import STRATEGIES
from recipe.async_pipeline.verl_bridge import replaced
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke, refused

pytestmark = pytest.mark.real_engine

ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


# Without the switch.


def test_without_the_switch_nothing_changes(launch: ModuleType, smoke: Smoke) -> None:
    config = smoke(switched_on=False)
    before = copy.deepcopy(config)
    launch.prepare(config)
    assert config == before
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("async_strategy", "on_policy"),
        (f"{OWN}.strategy", "naive"),
        (f"{OWN}.staleness.max_lag", 1),
        (f"{OWN}.training.old_logp", "rollout"),
        (f"{OWN}.staleness.depth", 2),
        ("pg_variant", "topr"),
        ("staleness_threshold", 0.5),
        ("trainer.use_nodes_ratios", [0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_without_the_switch_our_keys_are_an_error(
    launch: ModuleType, capsys: pytest.CaptureFixture[str], path: str, value: Any
) -> None:
    config = OmegaConf.create({})
    OmegaConf.update(config, path, value, force_add=True)
    assert "add +async_pipeline=True" in refused(launch, config, capsys)


# In a verl without our patches.


def strategy_runs(plain: Any) -> Any:
    """Return what a run reads of a prepared config: without the time, the run's name and Ray's start."""
    for name in ("started_unix", "run"):
        del plain["trainer"]["v1"]["async_pipeline_runtime"][name]
    del plain["ray_kwargs"]
    return plain


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "async_strategy": "n_step_ahead",
            f"{OWN}.staleness.max_lag": 3,
            f"{OWN}.training.old_logp": "rollout",
            f"{CORRECTION}.rollout_is": None,
        },
        {
            "algorithm.adv_estimator": "gae",
            "trainer.n_gpus_per_node": 2,
            "ray_kwargs.ray_init.num_gpus": 3,
            f"{OWN}.pools": {role: {"roles": [role], "devices": 1} for role in ("train", "logp", "generate")},
        },
    ],
    ids=["defaults", "lag", "pools"],
)
def test_a_run_of_an_unpatched_verl_is_prepared_as_any_other(
    launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Although verl has resolved the config by then, and has started Ray."""
    needed: list[tuple[str, int]] = []
    monkeypatch.setattr(launch, "require_devices", lambda *asked: needed.append(asked))
    usual = smoke(changes)
    launch.prepare(usual)
    late = smoke({**changes, MODE: PATCH_FREE}, switched_on=False)
    OmegaConf.resolve(late)
    launch.adopt(late)
    found, expected = (OmegaConf.to_container(one, resolve=True) for one in (late, usual))
    assert strategy_runs(found) == strategy_runs(expected)
    assert [resource for resource, _ in needed] == ["GPU"]


def test_verls_config_refers_to_no_value_that_changes_late(smoke: Smoke) -> None:
    sizes = {f"{part}.{name}" for part in ("trainer", ROLLOUT) for name in ("nnodes", "n_gpus_per_node")}
    attention = {f"{part}.model.override_config" for part in ("actor_rollout_ref", "critic")}
    memory = f"{ROLLOUT}.gpu_memory_utilization"
    changed = sizes | attention | {"data.train_batch_size", memory}
    raw: Any = OmegaConf.to_container(smoke(), resolve=False)
    referring = {
        path: target
        for path, value in walk(raw)
        if isinstance(value, str)
        for target in changed & set(re.findall(r"[\w.]+", value))
        if "${" in value and path not in changed
    }
    assert referring == {}


@pytest.mark.parametrize("way", ["mode", "switch"])
def test_the_patches_are_required_by_the_switch_only(
    launch: ModuleType, smoke: Smoke, load: Load, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def pristine(root: Any) -> None:
        raise PatchedVerlRequired("verl/trainer/main_ppo.py is pristine")

    checks = load("recipe.async_pipeline.verl_bridge.rules.config_checks")
    monkeypatch.setattr(checks, "require_patched", pristine)
    if way == "mode":
        assert launch.checked(smoke({MODE: PATCH_FREE}, switched_on=False)) is not None
    else:
        with pytest.raises(PatchedVerlRequired):
            launch.checked(smoke())


# With the switch.


def test_a_config_is_rewritten(launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_PIPELINE_STARTED_UNIX", "1234.5")
    config = smoke(
        {
            "async_strategy": "n-step-ahead",
            "trainer.generate_ahead_steps": 3,
            f"{ROLLOUT}.enable_dual_buffer": True,
            f"{ROLLOUT}.param_update_preduce_bucket_size_mb": 64,
            f"{OWN}.weight_sync.verify_tensors": 4,
            f"{ROLLOUT}.dtype": "float16",
        }
    )
    launch.prepare(config)
    for path in (
        "async_pipeline",
        "async_strategy",
        "trainer.generate_ahead_steps",
        f"{ROLLOUT}.enable_dual_buffer",
    ):
        assert OmegaConf.select(config, path) is None, f"{path} is not a key of verl and must be removed"
    own = config.trainer.v1.async_pipeline
    assert (own.strategy, own.staleness.max_lag) == ("n_step_ahead", 2)
    assert (own.weight_sync.verify_tensors, list(own.custom_stages)) == (4, [])
    assert config.trainer.v1.async_pipeline_runtime.started_unix == 1234.5
    assert config.trainer.v1.trainer_mode == "n_step_ahead"
    assert config.actor_rollout_ref.hybrid_engine is False
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == launch.MANAGER
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    assert (engine.backend, engine.custom_backend_module) == ("dual_buffer", launch.ENGINE_MODULE)
    assert engine.update_weights_bucket_megabytes == 64
    assert dict(engine.engine_kwargs.dual_buffer) == {"rollout_dtype": "float16", "proof_tensors": 4}
    OmegaConf.to_container(config, resolve=True)


def test_classes_named_in_the_config_exist(launch: ModuleType, load: Load) -> None:
    module, _, name = launch.MANAGER.rpartition(".")
    assert hasattr(load(module), name)
    load(launch.ENGINE_MODULE)


def test_the_strategies_are_registered_with_verl(launch: ModuleType, load: Load) -> None:
    ours = load("recipe.async_pipeline.verl_bridge.trainer.registration")
    get = load("verl.trainer.ppo.v1.trainer_base").get_trainer_cls
    assert {name: get(name).schedule_class for name in ours.TRAINERS} == STRATEGIES
    assert [get(name).__name__ for name in STRATEGIES] == [
        *("OnPolicyTrainer", "OneStepOffTrainer", "NStepAheadTrainer", "FullyAsyncTrainer")
    ]
    ours.ensure_registered("recipe.async_pipeline.strategies:FullyAsync")
    assert get("recipe.async_pipeline.strategies:FullyAsync") is ours.VerlTrainer
    for wrong, reason in (("no_such_module:C", "cannot be imported"), ("builtins:dict", "must subclass")):
        with pytest.raises(ConfigError, match=reason):
            ours.ensure_registered(wrong)


@pytest.mark.parametrize(
    ("logger", "names"),
    [("console", ["console", "file"]), (["file", "console"], ["file", "console"]), (None, ["file"])],
)
def test_the_file_tracker_is_always_on(
    launch: ModuleType, smoke: Smoke, logger: Any, names: list[str]
) -> None:
    config = smoke({"trainer.logger": logger})
    launch.prepare(config)
    assert list(config.trainer.logger) == names


def test_translations_are_printed(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.prepare(smoke({"trainer.generate_ahead_steps": 1}))
    said = capsys.readouterr().out.splitlines()
    assert f"{MARK} trainer.generate_ahead_steps=1 -> staleness.max_lag=0" in said
    assert all(line.startswith(MARK) for line in said)


# The run directory.


def test_the_run_directory_and_its_link(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        config = smoke({"trainer.experiment_name": name})
        launch.prepare(config)
        run_dir = Path.cwd() / "outputs" / "smoke" / name
        assert config.trainer.v1.async_pipeline_runtime.run_dir == str(run_dir)
        assert f"{MARK} run directory {run_dir}\n" in capsys.readouterr().out
        latest = run_dir.parent / "latest"
        assert latest.is_symlink() and os.readlink(latest) == name, (
            "relative, so that the folder can be moved"
        )
    assert {p.name for p in (Path.cwd() / "outputs" / "smoke").iterdir()} == {"first", "second", "latest"}


def test_a_custom_run_directory(launch: ModuleType, smoke: Smoke, tmp_path: Path) -> None:
    config = smoke({f"{OWN}.run_dir": "mine/here"})
    launch.prepare(config)
    assert config.trainer.v1.async_pipeline_runtime.run_dir == str(tmp_path / "mine" / "here")
    assert (tmp_path / "mine" / "latest").resolve() == tmp_path / "mine" / "here"


def test_names_need_not_be_ascii_in_any_locale(
    launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", screen)
    config = smoke({"trainer.project_name": "実験", "trainer.experiment_name": "läuft"})
    launch.prepare(config)
    assert config.trainer.v1.async_pipeline_runtime.run_dir == str(Path.cwd() / "outputs" / "実験" / "läuft")
    assert rb"outputs/\u5b9f\u9a13/l\xe4uft" in screen.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_real_directory_named_latest_is_kept(launch: ModuleType, smoke: Smoke) -> None:
    latest = Path("outputs/smoke/latest")
    latest.mkdir(parents=True)
    launch.prepare(smoke())
    assert latest.is_dir() and not latest.is_symlink()
    assert {p.name for p in latest.parent.iterdir()} == {"latest", "run"}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (
            "latest",
            "experiment_name must not be latest, the link to the newest run, got 'latest'",
        ),
        ("a/latest", "experiment_name must not be latest"),
        ("../other/run", "experiment_name must name a folder below outputs, got '../other/run'; set another"),
        ("", "experiment_name must name a folder below outputs, got ''"),
        (None, "experiment_name must name a folder below outputs, got ''"),
        ("/somewhere", "experiment_name must name a folder below outputs"),
    ],
)
def test_a_name_cannot_lead_to_another_runs_folder(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str], name: str | None, rule: str
) -> None:
    launch.prepare(smoke())
    assert rule in refused(launch, smoke({"trainer.experiment_name": name}), capsys)


def test_the_records_of_an_earlier_run_of_the_same_name_are_kept(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("outputs/smoke/run").resolve()
    folder.mkdir(parents=True)
    (folder / "ledger.jsonl").write_text('{"n": 1, "kind": "opened", "run": "earlier"}\n')
    launch.prepare(smoke())
    assert "earlier" in (folder / "earlier.1" / "ledger.jsonl").read_text()
    assert f"{MARK} records of an earlier run are kept in {folder}/earlier.1\n" in capsys.readouterr().out


@pytest.mark.parametrize("taken", ["run", "checkpoints"])
def test_a_second_launch_is_refused_before_anything_is_changed(
    launch: ModuleType, smoke: Smoke, tmp_path: Path, capsys: pytest.CaptureFixture[str], taken: str
) -> None:
    keys = {
        "trainer.save_freq": 1,
        "trainer.default_local_dir": str(tmp_path / "checkpoints"),
        f"{OWN}.run_dir": str(tmp_path / "run"),
    }
    part = tmp_path / "checkpoints" / ".global_step_5.part"
    part.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    with (tmp_path / taken / ".owner").open("w") as lock:  # a lock of another descriptor is another owner's
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = refused(launch, smoke(keys), capsys)
    assert f"got {tmp_path / taken}, which belongs to another process; end that run or wait" in line
    assert part.exists(), "the checkpoint that the owner writes"
    assert not (tmp_path / "latest").exists()


def test_the_trainers_process_has_the_folders_too(
    launch: ModuleType, smoke: Smoke, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may outlive the driver. Its servers, which need Ray, are left out."""
    ours = load("recipe.async_pipeline.verl_bridge.trainer.registration")
    monkeypatch.setattr(ours, "hide_in_output", lambda: None)
    monkeypatch.setattr(ours.PipelineServerManager, "start_early", lambda config: None)
    folders = {f"{OWN}.run_dir": tmp_path / "run", "trainer.default_local_dir": tmp_path / "checkpoints"}
    config = smoke({"trainer.save_freq": 1, **{key: str(folder) for key, folder in folders.items()}})
    launch.prepare(config)
    ours.begin(config)
    for folder in folders.values():
        with (folder / ".trainer").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


# The Ray cluster.


def test_a_run_starts_its_own_cluster(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str]
) -> None:
    config = smoke()
    launch.prepare(config)
    init = config.ray_kwargs.ray_init
    assert (init.address, init.num_cpus, init.num_gpus) == ("local", 64, 2)
    assert f"{MARK} Ray: starts a new cluster on this machine" in capsys.readouterr().out
    assert config.trainer.v1.async_pipeline_runtime.run_dir_mark is None


def test_a_refused_run_shows_its_warnings_about_the_machine(
    launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(SystemExit):
        launch.prepare(smoke({"trainer.val_only": True}))
    problem, warning = capsys.readouterr().err.splitlines()
    assert problem.startswith(f"{MARK} trainer.val_only must be False")
    assert warning.startswith(f"{MARK} WARNING: uid 4000000 must have a name, ")


def test_watch_shows_all_problems(
    launch: ModuleType, smoke: Smoke, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        launch.prepare(smoke({"trainer.val_only": True, "trainer.save_freq": "never"}))
    screen = Screen(out := io.StringIO(), 0.0)
    for line in capsys.readouterr().err.splitlines():
        screen.line(line)
    screen.fail(2)
    shown = out.getvalue()
    assert "  1. " in shown and "  2. " in shown
    assert "trainer.val_only must be False" in shown and "trainer.save_freq must be a number" in shown


def test_a_new_cluster_needs_a_machine_that_it_can_start_on(
    launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 95)
    assert "RAY_TMPDIR must have at most 39 bytes, got 100" in refused(launch, smoke(), capsys)
    launch.prepare(smoke({"ray_kwargs.ray_init._temp_dir": "/tmp/ray"}))
    with socket.create_server(("", 0)) as server:
        launch.prepare(smoke({"ray_kwargs.ray_init.address": f"127.0.0.1:{server.getsockname()[1]}"}))


def test_a_run_joins_a_cluster_with_its_own_sizes(
    launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The devices of the config describe a new cluster, so they are neither checked nor handed to Ray."""
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        config = smoke({f"{ROLLOUT}.n_gpus_per_node": 4})
        launch.prepare(config)
    init = config.ray_kwargs.ray_init
    assert (init.address, init.num_cpus, init.num_gpus) == (address, None, None)
    assert "Ray: joins the running cluster at " in capsys.readouterr().out
    runtime = config.trainer.v1.async_pipeline_runtime
    assert (Path(runtime.run_dir) / runtime.run_dir_mark).exists()


def test_a_cluster_that_does_not_answer_is_an_error(
    launch: ModuleType, smoke: Smoke, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "does not answer" in refused(launch, smoke(), capsys)


# Layouts and installation.


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, tuple[list[str], int]], str]] = {
    "none": ({}, {"train": (["train", "ref_logp"], 1), "generate": (["generate"], 1)}, "update"),
    "halves": (
        {"trainer.use_nodes_ratios": [0.5] * 4, "trainer.n_gpus_per_node": 4, f"{ROLLOUT}.nnodes": 0},
        {"train": (["train", "ref_logp"], 2), "generate": (["generate"], 2)},
        "update",
    ),
    "quarters": (
        {
            "trainer.use_nodes_ratios": [0.25] * 4,
            "trainer.n_gpus_per_node": 4,
            f"{ROLLOUT}.n_gpus_per_node": 4,
        },
        {role: ([role], 2) for role in ("train", "logp", "ref_logp", "generate")},
        "logp_pool",
    ),
    "two roles on one": (
        {
            "trainer.sperated_node_tasks": [["logp", "actor-train"], "ref_logp", "generate"],
            "trainer.sperated_node_ratios": [0.5, 0.25, 0.25],
            "trainer.n_gpus_per_node": 2,
            f"{ROLLOUT}.n_gpus_per_node": 2,
        },
        {"train": (["train"], 2), "ref_logp": (["ref_logp"], 1), "generate": (["generate"], 1)},
        "update",
    ),
    "with a critic": (
        {
            f"{OWN}.pools": {
                "policy": {"roles": ["train"], "devices": 2},
                "value": {"roles": ["critic", "ref_logp"], "devices": 1},
                "rollout": {"roles": ["generate"], "devices": 1},
            },
            "trainer.n_gpus_per_node": 4,
            "algorithm.adv_estimator": "gae",
            "trainer.critic_warmup": 2,
        },
        {
            "policy": (["train", "logp"], 2),
            "value": (["critic", "ref_logp"], 1),
            "rollout": (["generate"], 1),
        },
        "trainer",
    ),
    "our own": (
        {
            f"{OWN}.pools": {
                "big": {"roles": ["train", "ref_logp"], "devices": 2},
                "small": {"roles": ["logp"], "devices": 1},
                "rollout": {"roles": ["generate"], "devices": 3},
            },
            "trainer.n_gpus_per_node": 5,
            f"{OWN}.training.old_logp": "trainer",
        },
        {"big": (["train", "ref_logp"], 2), "small": (["logp"], 1), "rollout": (["generate"], 3)},
        "trainer",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_reaches_verl(launch: ModuleType, smoke: Smoke, name: str) -> None:
    changes, pools, old_logp = LAYOUTS[name]
    config = smoke(
        {**changes, "actor_rollout_ref.actor.use_kl_loss": True, "ray_kwargs.ray_init.num_gpus": 8}
    )
    launch.prepare(config)
    runtime = config.trainer.v1.async_pipeline_runtime
    assert {pool.name: (pool.roles, sum(pool.per_node)) for pool in runtime.placement} == pools
    assert runtime.old_logp == old_logp
    sizes = [
        (part.nnodes, part.n_gpus_per_node) for part in (config.trainer, config.actor_rollout_ref.rollout)
    ]
    assert sizes == [
        (1, next(n for roles, n in pools.values() if role in roles)) for role in ("train", "generate")
    ]


def test_a_missing_plugin_is_an_error(
    launch: ModuleType,
    load: Load,
    smoke: Smoke,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load("recipe.async_pipeline.verl_bridge.process.after_import"), "_loaded", False)
    assert "pip install -e ." in refused(launch, smoke(), capsys)


def test_missing_patches_are_an_error(
    launch: ModuleType,
    load: Load,
    smoke: Smoke,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pristine(root: Path) -> None:
        raise PatchedVerlRequired(f"{root.name} is pristine; run `async-pipeline patch apply`, then retry")

    monkeypatch.setattr(
        load("recipe.async_pipeline.verl_bridge.rules.config_checks"), "require_patched", pristine
    )
    assert "patch apply" in refused(launch, smoke(), capsys)


# The sample store, started early.


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Record the calls to a fake TransferQueue and to `atexit.register`."""
    calls: dict[str, list[Any]] = {"init": [], "exit": [], "installed": []}

    def apply(part: str) -> None:
        assert part == "sample store"
        calls["installed"].append(len(calls["init"]))

    monkeypatch.setattr(replaced, "apply", apply)
    module = ModuleType("transfer_queue")
    module.init = calls["init"].append  # type: ignore[attr-defined]
    module.close = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transfer_queue", module)
    monkeypatch.setattr(atexit, "register", calls["exit"].append)
    return calls


def with_mode(mode: str) -> DictConfig:
    queue = {"backend": {"SimpleStorage": {"num_data_storage_units": "${units}"}}}
    return OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}, "transfer_queue": queue, "units": 3})


@pytest.mark.parametrize("mode", ["on_policy", "n_step_ahead", "my.module:Mine"])
def test_our_trainers_get_the_store_early(launch: ModuleType, store: dict[str, list[Any]], mode: str) -> None:
    launch.start_sample_store(with_mode(mode))
    assert store["init"] == [{"backend": {"SimpleStorage": {"num_data_storage_units": 3}}}], "resolved"
    assert store["exit"] == [sys.modules["transfer_queue"].close]
    assert store["installed"] == [0], "before the store starts"


def test_a_stock_trainer_starts_its_own_store(launch: ModuleType, store: dict[str, list[Any]]) -> None:
    launch.start_sample_store(with_mode("sync"))
    assert store == {"init": [], "exit": [], "installed": []}


@pytest.mark.parametrize(("there", "fits"), [(1, False), (2, True)])
def test_a_cluster_with_too_few_devices_is_one_line(
    launch: ModuleType,
    smoke: Smoke,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: int,
    fits: bool,
) -> None:
    config = smoke()
    launch.prepare(config)
    capsys.readouterr()
    ray = sys.modules[launch.require_devices.__module__].ray  # type: ignore[attr-defined]
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(there)})
    monkeypatch.setattr(launch, "get_resource_name", lambda: "GPU")
    if fits:
        launch.check_cluster(config)
        return
    with pytest.raises(SystemExit) as ended:
        launch.check_cluster(config)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(MARK) and error.count("\n") == 1
    assert "must have 2 devices (GPU)" in error and "got 1" in error


# Null keys.


def test_our_null_keys_do_not_reach_verl(launch: ModuleType, smoke: Smoke) -> None:
    """verl makes dataclasses of these sections, which refuse unknown keys."""
    nothing = {
        "async_strategy": None,
        "actor_rollout_ref.async_strategy": None,
        f"{ROLLOUT}.with_reward": None,
    }
    config = smoke(nothing)
    launch.prepare(config)
    for path in nothing:
        parent, _, leaf = path.rpartition(".")
        assert leaf not in (OmegaConf.select(config, parent) if parent else config)

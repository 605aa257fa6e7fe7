# SPDX-License-Identifier: Apache-2.0
"""What each patch is for, as seen from outside: run against one verl tree, in a separate process.

    PYTHONPATH=<tree> python probes.py <tree> <result.json>

Every probe returns if verl behaves as we need and raises if not; the result maps its name to null or to the
error. vLLM is a stand-in here: what is probed is verl's own code, and importing the real one takes seconds.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import json
import os
import runpy
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any
from unittest import mock

TREE = Path(sys.argv[1])
TRANSFER_TIMEOUT_S = 0.5
PATIENCE_S = 3.0
DELIVERY_S = 60.0
"""How long a sender may take beyond its own deadline before it counts as hanging."""


class _StandIn(types.ModuleType):
    """A module that has any name asked of it, as an empty class."""

    __path__: list[str] = []
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Serve(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `prefix` and all below it as stand-ins, and remembers which were imported."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.imported: list[str] = []

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == self.prefix or name.startswith(self.prefix + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        self.imported.append(module.__name__)


@contextmanager
def served(prefix: str) -> Iterator[_Serve]:
    """Within, importing `prefix` gives a stand-in."""
    finder = _Serve(prefix)
    hidden = {
        name: sys.modules.pop(name) for name in list(sys.modules) if (name + ".").startswith(prefix + ".")
    }
    sys.meta_path.insert(0, finder)
    try:
        yield finder
    finally:
        sys.meta_path.remove(finder)
        for name in finder.imported:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def load_file(name: str, path: str, **package: list[str]) -> types.ModuleType:
    """Import one file of the tree under a separate name, without its packages."""
    spec = importlib.util.spec_from_file_location(name, TREE / path, **package)  # type: ignore[arg-type]
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Reached(Exception):
    """Raised by a stand-in at the point where a probe has seen enough."""


HOOKS = "recipe.async_pipeline.verl_bridge.hooks"


@contextmanager
def hooks_replaced(**functions: Any) -> Iterator[None]:
    """Within, this package's front door has these functions only."""
    import recipe.async_pipeline.verl_bridge as package

    stand_in = types.ModuleType(HOOKS)
    stand_in.__dict__.update(functions)
    # The attribute too: `from package import hooks` looks there first.
    with (
        mock.patch.dict(sys.modules, {HOOKS: stand_in}),
        mock.patch.object(package, "hooks", stand_in, create=True),
    ):
        yield


@contextmanager
def hooks_broken(error: Exception) -> Iterator[None]:
    """Within, importing the front door raises `error`."""
    import recipe.async_pipeline.verl_bridge as package

    real = builtins.__import__

    def importing(name: str, *args: Any) -> Any:
        if name == package.__name__:
            raise error
        return real(name, *args)

    with mock.patch.object(builtins, "__import__", importing):
        yield


def run_main(config: Any) -> mock.Mock:
    """Call verl's entry point up to the start of the run; return the stand-in for that."""
    from verl.trainer import main_ppo

    names = ("auto_set_device", "validate_config", "need_reference_policy", "need_critic", "run_ppo")
    with mock.patch.multiple(main_ppo, **{name: mock.DEFAULT for name in names}) as stand_ins:
        main_ppo.main.__wrapped__(config)
    started: mock.Mock = stand_ins["run_ppo"]
    return started


def _config(**more: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({"trainer": {"use_v1": True}, "actor_rollout_ref": {"actor": {}}, **more})


def main_ppo_hands_its_config_over() -> None:
    config = _config(async_pipeline=True)
    seen: list[Any] = []
    with hooks_replaced(prepare=seen.append):
        run_main(config)
    assert seen == [config], f"prepare was called with {seen}"


def main_ppo_hands_its_command_line_over() -> None:
    seen: list[list[str]] = []

    def rewrite(argv: list[str]) -> None:
        seen.append(argv[1:])
        raise Reached

    argv = ["main_ppo.py", "--help", "data.seed=1"]
    with hooks_replaced(rewrite_command_line=rewrite), mock.patch.object(sys, "argv", argv):
        with suppress(Reached, SystemExit), mock.patch.object(sys, "stdout", io.StringIO()):
            runpy.run_path(str(TREE / "verl" / "trainer" / "main_ppo.py"), run_name="__main__")
    assert seen == [argv[1:]], f"rewrite_command_line was called with {seen}"


def main_ppo_names_a_broken_installation_if_the_switch_is_set() -> None:
    switches = (
        {"async_pipeline": True},
        {"actor_rollout_ref": {"actor": {}, "async_pipeline": True}},
    )
    for error in (ModuleNotFoundError("No module named 'recipe'"), AttributeError("half an upgrade")):
        for switch in switches:
            with hooks_broken(error):
                try:
                    run_main(_config(**switch))
                except SystemExit as ended:
                    line = str(ended)
                else:
                    raise AssertionError(f"{switch} was ignored without the package")
            assert "async_pipeline=True" in line and str(error) in line and "\n" not in line, line


def main_ppo_runs_without_the_package() -> None:
    for error in (ModuleNotFoundError("No module named 'recipe'"), AttributeError("half an upgrade")):
        with hooks_broken(error):
            assert run_main(_config()).called
            assert run_main(_config(async_pipeline=False)).called


def main_ppo_imports_no_launch_code_without_the_switch() -> None:
    import recipe

    launch_code = {"launch", "interrupts", "config_checks"}
    # The attribute too: a new import of the package replaces it.
    with mock.patch.dict(sys.modules), mock.patch.object(recipe, "async_pipeline"):
        for name in [name for name in sys.modules if name.startswith("recipe.async_pipeline")]:
            del sys.modules[name]
        assert run_main(_config()).called
        found = {name.rpartition(".")[2] for name in sys.modules if "async_pipeline.verl_bridge." in name}
    assert "hooks" in found, "the keys of a run without the switch are not checked"
    assert not found & launch_code, found & launch_code


def main_ppo_registers_the_trainers() -> None:
    import verl.trainer.ppo.v1
    from omegaconf import OmegaConf
    from verl.trainer import main_ppo

    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "one_step_off", "async_pipeline": {}}}})
    runner = main_ppo.TaskRunnerV1.__ray_metadata__.modified_class()
    begun: list[Any] = []
    with hooks_replaced(begin=begun.append):
        with mock.patch.object(verl.trainer.ppo.v1, "get_trainer_cls", side_effect=Reached):
            try:
                runner.run(config)
            except Reached:
                pass
    assert begun == [config], "the trainer was looked up before the strategies were registered"


def main_ppo_lets_the_hooks_wait_for_the_run() -> None:
    import ray
    from omegaconf import OmegaConf
    from verl.trainer import main_ppo

    happened: list[str] = []
    runner = mock.Mock()
    runner.remote.return_value.run.remote.side_effect = lambda config: happened.append("run")
    rollout = {"full_determinism": False}
    base = {
        "actor_rollout_ref": {"rollout": rollout},
        "reward": {"reward_model": {"enable": False, "rollout": rollout}},
        "trainer": {"logger": []},
        "ray_kwargs": {},
        "global_profiler": {"tool": None},
    }
    with (
        mock.patch.object(ray, "get", side_effect=lambda running: happened.append("wait")),
        mock.patch.object(ray, "is_initialized", return_value=True),
        hooks_replaced(wait_for=lambda running, config: happened.append("hook")),
    ):
        main_ppo.run_ppo(OmegaConf.create(base), runner)
        assert happened == ["run", "wait"], f"a run without the pipeline did {happened}"
        happened.clear()
        main_ppo.run_ppo(OmegaConf.merge(base, {"trainer": {"v1": {"async_pipeline": {}}}}), runner)
    assert happened == ["run", "hook", "wait"], f"with the pipeline it did {happened}"


def verl_reexports_the_public_names() -> None:
    import recipe.async_pipeline as ours

    theirs = importlib.import_module("verl.trainer.ppo.pipeline")
    for name in ("AsyncTrainingFlow", "RoleStateMachine", "create_role_state_machine", "register_role"):
        assert getattr(theirs, name) is getattr(ours, name), name


def separate_async_starts_without_hybrid_replicas() -> None:
    from verl.trainer.ppo.v1 import trainer_separate_async as module

    trainer = mock.MagicMock(_enable_hybrid_replicas=False)
    trainer.config.actor_rollout_ref.rollout.prometheus.enable = False
    names = ("LLMServerManager", "CheckpointEngineManager", "omega_conf_to_dataclass")
    setup = module.PPOTrainerSeparateAsync._setup
    # `super()` requires an instance of the class; its own part of the set-up is not what is probed.
    instance = object.__new__(module.PPOTrainerSeparateAsync)
    instance.__dict__.update(
        {name: getattr(trainer, name) for name in ("config", "llm_server_manager", "actor_rollout_wg")}
    )
    instance._enable_hybrid_replicas = False
    with (
        mock.patch.multiple(module, **{name: mock.DEFAULT for name in names}),
        mock.patch.object(module.PPOTrainer, "_setup"),
    ):
        setup(instance)
    assert instance.current_mode is module.HybridEngineMode.TRAINER


def _load_transfer() -> types.ModuleType:
    class NoDevice:
        synchronize = empty_cache = staticmethod(lambda: None)

    module = load_file("probed_transfer", "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py")
    module.get_torch_device = lambda: NoDevice  # type: ignore[attr-defined]
    module.is_support_ipc = lambda: False  # type: ignore[attr-defined]
    return module


def _outcome(action: Callable[[], None], limit_s: float) -> BaseException | None:
    """Run `action` in a thread; return what it raised. Raises TimeoutError: it still runs after `limit_s`."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  handed to the caller
            raised.append(error)

    # A daemon: a sender that hangs for ever must not hold the process.
    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"still waiting after {limit_s} s")
    return raised[0] if raised else None


def _send(
    module: types.ModuleType, endpoint: str, limit_s: float = TRANSFER_TIMEOUT_S + PATIENCE_S
) -> BaseException | None:
    import torch

    weights = [(f"layer{i}", torch.ones(200_000)) for i in range(3)]  # 0.8 MB each: a bucket of 1 MB each
    sender = module.BucketedWeightSender(endpoint, bucket_size_mb=1, use_shm=True)
    return _outcome(lambda: asyncio.run(sender.async_send_weights(iter(weights))), limit_s)


def _check_lost_peer(error: BaseException | None, endpoint: str) -> None:
    assert isinstance(error, RuntimeError), f"the sender ended with {error!r}"
    said = str(error)
    assert endpoint in said and (f"within {TRANSFER_TIMEOUT_S:g} s" in said or "went away" in said), said


def sender_raises_when_receiver_dies() -> None:
    import zmq

    module = _load_transfer()
    with tempfile.TemporaryDirectory() as scratch:
        endpoint = f"ipc://{scratch}/weights.sock"
        shm_names: list[str] = []

        def answer_the_first_bucket_and_die() -> None:
            socket: Any = zmq.Context.instance().socket(zmq.REP)
            socket.connect(endpoint)
            shm_names.append(socket.recv_pyobj()["name"])
            socket.send(b"")
            socket.recv_pyobj()
            socket.send(b"")
            socket.close()

        threading.Thread(target=answer_the_first_bucket_and_die, daemon=True).start()
        _check_lost_peer(_send(module, endpoint), endpoint)
        _check_gone(shm_names[0])
        assert not os.path.exists(f"{scratch}/weights.sock")


def sender_raises_when_receiver_never_answers() -> None:
    import zmq

    module = _load_transfer()
    with tempfile.TemporaryDirectory() as scratch:
        endpoint = f"ipc://{scratch}/weights.sock"
        mute: Any = zmq.Context.instance().socket(zmq.REP)
        mute.connect(endpoint)
        _check_lost_peer(_send(module, endpoint), endpoint)
        _check_gone(mute.recv_pyobj()["name"])
        mute.close(linger=0)


def sender_names_the_peer_whose_death_swallowed_a_message() -> None:
    # libzmq then believes that nothing was sent, which is the state of a socket that has sent nothing.
    module = _load_transfer()
    with tempfile.TemporaryDirectory() as scratch:
        endpoint = f"ipc://{scratch}/weights.sock"
        sender = module.BucketedWeightSender(endpoint, bucket_size_mb=1, use_shm=True)
        sender._init_socket()
        error = _outcome(sender.socket.recv, PATIENCE_S)
        sender._cleanup()
        _check_lost_peer(error, endpoint)
        assert "went away" in str(error), str(error)


def _check_gone(shm_name: str) -> None:
    try:
        shared_memory.SharedMemory(name=shm_name).close()
    except FileNotFoundError:
        return
    raise AssertionError(f"the sender left its shared memory {shm_name}")


def receiver_raises_without_a_sender() -> None:
    import torch

    module = _load_transfer()
    with tempfile.TemporaryDirectory() as scratch:
        endpoint = f"ipc://{scratch}/weights.sock"
        receiver = module.BucketedWeightReceiver(endpoint, torch.device("cpu"), use_shm=True)
        action = lambda: receiver.receive_weights(lambda weights, is_last: None)  # noqa: E731
        _check_lost_peer(_outcome(action, TRANSFER_TIMEOUT_S + PATIENCE_S), endpoint)


def all_masked_batch_has_zero_loss() -> None:
    import torch
    from verl.trainer.ppo.core_algos import agg_loss

    counts: list[dict[str, Any]] = [{}, {"batch_num_tokens": 0, "dp_size": 2, "global_batch_size": 4}]
    modes = (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "seq-mean-token-mean",
    )
    for mode in modes:
        for given in counts:
            values = torch.ones(2, 3, requires_grad=True)
            loss = agg_loss(values * 2, torch.zeros(2, 3), mode, **given)
            loss.backward()
            assert loss.item() == 0.0, f"{mode} with {given}: {loss.item()}"
            assert values.grad is not None and torch.equal(values.grad, torch.zeros(2, 3)), (
                f"{mode}: {values.grad}"
            )


def value_model_has_the_attention_of_its_config() -> None:
    import torch
    from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM
    from verl.utils.model import load_valuehead_model

    sizes: dict[str, int] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(
            folder
        )
        config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
        config.num_labels = 1
        model = load_valuehead_model(folder, torch.float32, config, False)
    assert model.config._attn_implementation == "sdpa"


def loss_of_a_partly_masked_batch_is_as_published() -> None:
    import torch
    from verl.trainer.ppo.core_algos import agg_loss

    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    expected = {"token-mean": 1.5, "token-sum": 3.0, "seq-mean-token-sum": 3.0, "seq-mean-token-mean": 1.5}
    for mode, value in expected.items():
        assert abs(agg_loss(values, mask, mode).item() - value) < 1e-6, mode


def weights_arrive_whole() -> None:
    import torch

    module = _load_transfer()
    # Both sides live, so a slow machine must not expire the wait.
    vars(module)["TRANSFER_TIMEOUT_S"] = DELIVERY_S
    with tempfile.TemporaryDirectory() as scratch:
        endpoint = f"ipc://{scratch}/weights.sock"
        received: dict[str, float] = {}

        def receive() -> None:
            receiver = module.BucketedWeightReceiver(endpoint, torch.device("cpu"), use_shm=True)
            receiver.receive_weights(
                lambda pairs, last: received.update({k: v.sum().item() for k, v in pairs})
            )

        threading.Thread(target=receive, daemon=True).start()
        error = _send(module, endpoint, DELIVERY_S)
        assert error is None, repr(error)
        assert received == {f"layer{i}": 200_000.0 for i in range(3)}


PROBES = (
    main_ppo_hands_its_command_line_over,
    main_ppo_hands_its_config_over,
    main_ppo_names_a_broken_installation_if_the_switch_is_set,
    main_ppo_runs_without_the_package,
    main_ppo_imports_no_launch_code_without_the_switch,
    main_ppo_registers_the_trainers,
    main_ppo_lets_the_hooks_wait_for_the_run,
    verl_reexports_the_public_names,
    separate_async_starts_without_hybrid_replicas,
    weights_arrive_whole,
    sender_raises_when_receiver_dies,
    sender_raises_when_receiver_never_answers,
    sender_names_the_peer_whose_death_swallowed_a_message,
    receiver_raises_without_a_sender,
    all_masked_batch_has_zero_loss,
    loss_of_a_partly_masked_batch_is_as_published,
    value_model_has_the_attention_of_its_config,
)


def probe_all() -> dict[str, str | None]:
    """Run every probe, even if others fail."""
    import verl
    import verl.trainer.main_ppo
    import verl.trainer.ppo.v1  # noqa: F401  now: a probe that replaces `sys.modules` would drop what it imports

    assert Path(verl.__file__).is_relative_to(TREE), f"probing {verl.__file__} instead of {TREE}"
    results: dict[str, str | None] = {}
    for probe in PROBES:
        try:
            probe()
        except BaseException as error:  # noqa: BLE001  it is the result
            results[probe.__name__] = f"{type(error).__name__}: {error}"
        else:
            results[probe.__name__] = None
    return results


if __name__ == "__main__":
    os.environ["VERL_WEIGHT_TRANSFER_TIMEOUT_S"] = str(TRANSFER_TIMEOUT_S)
    with served("vllm"):
        found = probe_all()
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    # Not sys.exit: on a pristine tree a sender hangs in its thread, and so would the interpreter's end.
    os._exit(0)

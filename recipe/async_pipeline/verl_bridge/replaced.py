# SPDX-License-Identifier: Apache-2.0
"""Every name of verl, Ray, SGLang, vLLM, TransferQueue or OmegaConf that is replaced at run time.

A name is replaced where its package offers no setting, argument or base class; small faults of verl are
patched (`patches/`). The process that needs a part of the table applies it:

    from .. import replaced
    replaced.apply("trainer")

Importing this module loads nothing else, because processes of engines import it before their engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from types import ModuleType
from typing import Any, NamedTuple

from .process.after_import import after_import


class Replacement(NamedTuple):
    """A name of another package, and what takes its place."""

    module: str
    name: str
    """`name`, or `Class.member`."""
    by: str
    """`module:name` below `verl_bridge`; without a colon, the argument of `apply` that has this name."""
    why: str
    remove_when: str
    wraps: bool = False
    """Whether `by` is a function that gets what is replaced and returns the replacement."""


REPLACED: Mapping[str, tuple[Replacement, ...]] = {
    # The driver and the commands that compose a configuration.
    "configuration": (
        Replacement(
            "omegaconf._utils",
            "get_yaml_loader",
            "launch.run_config:with_libyaml",
            why="OmegaConf reads YAML in Python",
            remove_when="OmegaConf reads with libyaml",
            wraps=True,
        ),
        Replacement(
            "omegaconf.base",
            "parse",
            "launch.run_config:parsed_once",
            why="OmegaConf parses an interpolation each time it is resolved",
            remove_when="OmegaConf keeps what it has parsed",
            wraps=True,
        ),
    ),
    # Every process that imports verl, for entry points other than main_ppo.
    "entry points": (
        Replacement(
            "verl.trainer.main_ppo",
            "run_ppo",
            "launch.entry_points:of_any_entry_point",
            why="other entry points would ignore +async_pipeline=True",
            remove_when="verl calls a plug-in with the configuration of every entry point",
            wraps=True,
        ),
        Replacement(
            "verl.utils.config",
            "validate_config",
            "launch.entry_points:without_switch",
            why="entry points with their own run_ppo would ignore +async_pipeline=True",
            remove_when="verl calls a plug-in with the configuration of every entry point",
            wraps=True,
        ),
    ),
    # Every process that imports verl.
    "files of users": (
        Replacement(
            "verl.utils.import_utils",
            "load_module",
            "process.user_modules:as_python_does",
            why="verl executes a file as a module that dataclasses, pickle and its neighbours do not find",
            remove_when="verl registers the module of a file in sys.modules",
            wraps=True,
        ),
        Replacement(
            "verl.tools.tool_registry",
            "load_function_tools_from_path",
            "process.user_modules:with_neighbours",
            why="a file of tools cannot import its neighbours",
            remove_when="verl adds the folder of the file to sys.path",
            wraps=True,
        ),
    ),
    # The driver, before verl starts Ray.
    "driver": (
        Replacement(
            "ray",
            "init",
            "launch.ray_cluster:with_cause",
            why="an error of Ray's start has tens of lines, of which none says what to do, and a busy "
            "machine needs more than its 30 s",
            remove_when="Ray's errors are one line with a remedy, and the time for a start can be set",
            wraps=True,
        ),
    ),
    # The trainer's process.
    "trainer": (
        Replacement(
            "verl.trainer.ppo.v1.trainer_base",
            "LLMServerManager",
            "rollout.server_manager:ColocatedLoadBalancer",
            why="the trainer must not start replicas, and the load balancer must be on the trainer's node",
            remove_when="verl's trainer takes the class of its server manager from the config",
        ),
        Replacement(
            "verl.trainer.ppo.v1.trainer_base",
            "RewardLoopManager",
            "reward.worker:PipelineRewardLoopManager",
            why="a reward worker whose process ends is started again, and takes responses as lists",
            remove_when="verl's trainer takes the class of its reward manager from the config",
        ),
        Replacement(
            "verl.trainer.ppo.v1.trainer_base",
            "get_seqlen_balanced_partitions",
            "trainer.batches.data_rows:balanced_partitions",
            why="verl sorts tensors of one element each: 7.9 s for 16,384 responses, 0.0 s as numbers",
            remove_when="verl sorts numbers",
        ),
        Replacement(
            "verl.trainer.ppo.v1.trainer_base",
            "compute_advantage_for_multi_trajectories",
            "trainer.batches.advantages:session_advantages",
            why="verl reads the advantage of a session from a token that may be masked",
            remove_when="verl takes the advantage from the score of the session",
        ),
    ),
    # Every process that uses TransferQueue.
    "sample store client": (
        Replacement(
            "transfer_queue.utils.common",
            "psutil",
            "store.sample_store:counted_once",
            why="TransferQueue counts the cores for each request, from a file for each: 0.4 ms with two",
            remove_when="TransferQueue counts them once",
            wraps=True,
        ),
        Replacement(
            "transfer_queue.client",
            "TQ_NUM_THREADS",
            "store.sample_store:at_most_cores",
            why="TransferQueue warns in each request if there are fewer cores than threads",
            remove_when="TransferQueue warns once",
            wraps=True,
        ),
        Replacement(
            "transfer_queue.storage.simple_storage",
            "TQ_NUM_THREADS",
            "store.sample_store:at_most_cores",
            why="as in transfer_queue.client",
            remove_when="TransferQueue warns once",
            wraps=True,
        ),
    ),
    # The driver, before `transfer_queue.init`.
    "sample store": (
        Replacement(
            "transfer_queue.storage.bootstrap.simple_storage_bootstrap",
            "SimpleStorageUnit",
            "store.sample_store:storage_actor",
            why="the process of a storage needs the part `sample store client`",
            remove_when="that part is empty",
            wraps=True,
        ),
        Replacement(
            "transfer_queue.interface",
            "TransferQueueController",
            "store.sample_store:controller_actor",
            why="the controller's process needs the part `sample store controller`",
            remove_when="that part is empty",
            wraps=True,
        ),
    ),
    "sample store controller": (
        Replacement(
            "transfer_queue.controller",
            "FieldMeta.remove_samples",
            "store.sample_store:remove_samples",
            why="to clear samples, TransferQueue looks at all that remain: 62 % of its controller's time",
            remove_when="TransferQueue stops at the second shape",
        ),
    ),
    # Agent loop workers.
    "agent loops": (
        Replacement(
            "verl.experimental.agent_loop.agent_loop",
            "hydra",
            "agent_loop.hydra_cache:hydra_of_agent_loops",
            why="verl resolves the class of the agent loop, and merges its config, for each response; with "
            "the next row and `ct_build_initial_tokens` a response costs a worker 0.8 instead of 1.8 ms",
            remove_when="verl instantiates an agent loop once",
            wraps=True,
        ),
        Replacement(
            "verl.experimental.agent_loop.agent_loop",
            "create_continuous_token_builder",
            "agent_loop.tokens.prompt_tokens:created_once",
            why="verl creates the builder of chat templates for each response",
            remove_when="verl creates it once for a worker",
            wraps=True,
        ),
        Replacement(
            "verl.experimental.agent_loop.agent_loop",
            "AgentLoopBase.ct_merge_assistant_token",
            "agent_loop.tokens.prompt_tokens:merge_assistant_token",
            why="verl appends the tokens of a turn in a thread, which costs 0.1 ms to wake",
            remove_when="verl does so on the event loop",
        ),
        Replacement(
            "verl.trainer.ppo.v1.agent_loop_tq",
            "tq",
            "agent_loop.stored_sessions:STORE",
            why="verl stores each session with one put; a group is stored with one",
            remove_when="verl's worker has a method that stores a session",
        ),
        Replacement(
            "verl.trainer.ppo.v1.agent_loop_tq",
            "list_of_dict_to_tensordict",
            "agent_loop.stored_sessions:columns_of",
            why="as `tq`: a group is stored as rows",
            remove_when="verl's worker has a method that stores a session",
        ),
    ),
    "unusable prompts": (
        Replacement(
            "verl.experimental.agent_loop.agent_loop",
            "AgentLoopBase._cap_text_prompt_length",
            "refuse_long",
            why="verl cuts the beginning of a prompt that is too long, which holds the instructions",
            remove_when="verl has a setting that refuses such prompts",
            wraps=True,
        ),
        Replacement(
            "verl.experimental.agent_loop.agent_loop",
            "AgentLoopBase.process_multi_modal_info",
            "refuse_pictures",
            why="a picture that is broken, missing or too long would be read again for each attempt",
            remove_when="verl tells a prompt that cannot be read from an agent that failed",
            wraps=True,
        ),
        Replacement(
            "verl.experimental.agent_loop.agent_loop",
            "AgentLoopBase.ct_build_initial_tokens",
            "tokenize",
            why="verl tokenizes the prompt for each response of its group, and again for each attempt at one "
            "with pictures of too many tokens",
            remove_when="verl tokenizes a prompt once, and tells an unusable one from an agent that failed",
            wraps=True,
        ),
    ),
    "tools": (
        Replacement(
            "verl.experimental.agent_loop.tool_agent_loop",
            "ToolAgentLoop._call_tool",
            "agent_loop.episodes.episode:limited",
            why="verl waits for a tool for as long as it takes, and a tool that calls exit() ends the worker",
            remove_when="verl has a deadline for tools",
            wraps=True,
        ),
        Replacement(
            "verl.tools.function_tool",
            "FunctionTool.call",
            "agent_loop.episodes.episode:call_function",
            why="verl calls functions in the few threads of its loop, so that some that hang stop all others",
            remove_when="verl calls each in a separate thread",
        ),
    ),
    # Every process that imports verl with VERL_PLATFORM=cpu.
    "CPU platform": (
        Replacement(
            "ray._private.ray_constants",
            "SETUP_WORKER_FILENAME",
            "cpu.cpu_overrides:FORK_WORKER",
            why="each worker process of Ray imports verl, which takes 10 to 15 s of a core",
            remove_when="Ray forks its workers from a process that has made the imports of the job",
        ),
        Replacement(
            "verl.utils.distributed",
            "initialize_global_process_group_ray",
            "cpu.cpu_overrides:with_gloo",
            why="verl names the device `cpu` twice in a backend string, which torch refuses",
            remove_when="verl supports a CPU platform",
            wraps=True,
        ),
        Replacement(
            "verl.utils.model",
            "load_valuehead_model",
            "cpu.cpu_overrides:load_valuehead_model",
            why="verl loads a critic with flash attention",
            remove_when="verl uses the attention of the model's config",
        ),
    ),
    # The process from which workers of Ray are forked, on the CPU platform.
    "fork server of workers": (
        Replacement(
            "ray.actor",
            "ActorClassID",
            "cpu.fork_worker:ClassIds",
            why="Ray draws an id for each class of actors, after which all forks draw the same ids",
            remove_when="Ray draws other ids in a fork, or forks its workers itself",
        ),
    ),
    # Training workers on the CPU platform.
    "training on a CPU": (
        Replacement(
            "verl.workers.engine.fsdp.transformer_impl",
            "CPUOffloadPolicy",
            "workers.training_worker:without_pinned_memory",
            why="verl pins the memory of a model that only computes forward, which requires an accelerator",
            remove_when="verl pins memory only if there is an accelerator",
            wraps=True,
        ),
    ),
    # Every training worker. With flash-attn verl does not call it.
    "training without flash-attn": (
        Replacement(
            "verl.utils.torch_functional",
            "logprobs_from_logits_v2",
            "workers.packed_sequences:log_probs_of",
            why="verl computes the log-probs of packed tokens one by one, and rounds them to bfloat16",
            remove_when="verl computes them together, in float32",
        ),
    ),
    # Rollout servers with vLLM, and the processes of its engine.
    "vLLM's server": (
        Replacement(
            "vllm.v1.engine.utils",
            "get_mp_context",
            "cpu.prefork:forking",
            why="vLLM spawns its engine core, whose imports take seconds; the fork server has made them",
            remove_when="vLLM takes the context of its processes from a setting",
            wraps=True,
        ),
    ),
    "vLLM's engine core": (
        Replacement(
            "vllm.v1.engine.core",
            "EngineCore.load_snapshot",
            "rollout.vllm.plugin:load_snapshot",
            why="a version is loaded between two steps, and only the engine core knows how far requests are",
            remove_when="vLLM has extensions of the engine core",
        ),
    ),
    "vLLM's layers on a CPU": (
        Replacement(
            "vllm._custom_ops",
            "_supports_onednn",
            "rollout.vllm.adapter:USE_ONEDNN",
            why="a packed weight cannot be compared with the published one",
            remove_when="vLLM can keep weights unpacked on a CPU",
        ),
        Replacement(
            "vllm.model_executor.layers.utils",
            "check_cpu_sgl_kernel",
            "rollout.vllm.adapter:no_sgl_kernel",
            why="as _supports_onednn",
            remove_when="vLLM can keep weights unpacked on a CPU",
        ),
        Replacement(
            "vllm.model_executor.layers.utils",
            "dispatch_cpu_unquantized_gemm",
            "rollout.vllm.cpu_convolution:of_matrices_alone",
            why="on a CPU with AMX it packs the weights of convolutions",
            remove_when="vLLM can keep weights unpacked on a CPU",
            wraps=True,
        ),
        Replacement(
            "vllm._custom_ops",
            "causal_conv1d_fwd_cpu",
            "rollout.vllm.cpu_convolution:of_unpacked",
            why="on a CPU with AMX, linear attention says that the weight is packed",
            remove_when="vLLM can keep weights unpacked on a CPU",
            wraps=True,
        ),
        Replacement(
            "vllm._custom_ops",
            "causal_conv1d_update_cpu",
            "rollout.vllm.cpu_convolution:of_unpacked",
            why="as causal_conv1d_fwd_cpu",
            remove_when="vLLM can keep weights unpacked on a CPU",
            wraps=True,
        ),
    ),
    "vLLM's adapters": (
        Replacement(
            "vllm.model_executor.models.utils",
            "WeightsMapper.get_unstacked_mapper",
            "rollout.vllm.adapter:renamed_mapper",
            why="verl's loader of adapters calls a method that vLLM 0.32 has renamed to get_rename_mapper",
            remove_when="verl calls it by its new name",
        ),
    ),
    "fp8 that is converted already": (
        Replacement(
            "verl.utils.vllm.vllm_quant_utils",
            "quant_weights",
            "rollout.vllm.block_fp8:unless_converted",
            why="verl's loader finds the conversion by this name, and would convert weights a second time",
            remove_when="verl's loader takes the conversion as an argument",
            wraps=True,
        ),
    ),
    # Rollout servers with SGLang, and its schedulers.
    "SGLang's server": (
        Replacement(
            "sglang.srt.entrypoints.engine",
            "run_scheduler_process",
            "run_scheduler",
            why="the scheduler's process must apply the part `SGLang's scheduler`",
            remove_when="SGLang takes the function from its caller",
        ),
        Replacement(
            "sglang.srt.entrypoints.engine",
            "run_detokenizer_process",
            "rollout.sglang.scheduler:run_detokenizer_process",
            why="the process must end with its parent",
            remove_when="SGLang's detokenizer ends with its parent",
        ),
        Replacement(
            "verl.workers.rollout.sglang_rollout.async_sglang_server",
            "sglang_lora_target_modules",
            "rollout.sglang.lora:target_modules",
            why="verl names modules for adapters that SGLang does not have",
            remove_when="verl names the modules of the adapter",
        ),
    ),
    "SGLang's server on a CPU": (
        Replacement(
            "sglang.srt.entrypoints.engine",
            "mp",
            "cpu.prefork:forking_module",
            why="SGLang spawns its processes, whose imports take seconds; the fork server has made them",
            remove_when="SGLang takes the context of its processes from a setting",
            wraps=True,
        ),
    ),
    "SGLang's scheduler": (
        Replacement(
            "sglang.srt.managers.scheduler",
            "Scheduler",
            "rollout.sglang.scheduler:pipeline_scheduler",
            why="the scheduler must take this package's calls: loads, proofs and states of requests",
            remove_when="SGLang takes the class of its scheduler from its caller",
            wraps=True,
        ),
    ),
    "SGLang's scheduler on a CPU": (
        Replacement(
            "sglang.srt.layers.logits_processor",
            "torch",
            "rollout.sglang.cpu_stubs:WITHOUT_PINNING",
            why="it pins tensors to score a prompt, which torch's CPU build cannot do",
            remove_when="SGLang pins tensors for an accelerator only",
        ),
        Replacement(
            "sglang.srt.lora.layers",
            "torch",
            "rollout.sglang.cpu_stubs:WITHOUT_PINNING",
            why="it pins tensors of LoRA adapters",
            remove_when="SGLang pins tensors for an accelerator only",
        ),
        Replacement(
            "sglang.srt.lora.backend.torch_backend",
            "torch",
            "rollout.sglang.cpu_stubs:WITHOUT_PINNING",
            why="it pins tensors of LoRA adapters",
            remove_when="SGLang pins tensors for an accelerator only",
        ),
        Replacement(
            "sglang.srt.constrained.xgrammar_backend",
            "XGrammarGrammar.apply_vocab_mask",
            "rollout.sglang.cpu_stubs:apply_mask",
            why="it refuses to mask tokens on a CPU, which XGrammar itself can do",
            remove_when="SGLang applies grammars on a CPU",
        ),
    ),
}
"""By the part that a process applies."""

_Place = tuple[str, str]
_stock: dict[_Place, Any] = {}
_ours: dict[_Place, Any] = {}
_awaited: set[_Place] = set()


def apply(part: str, **given: Any) -> None:
    """Replace the names of a part in this process, importing their modules.

    `given` has the values that rows name, and the arguments of functions that wrap. A second call replaces
    what the first one has put there.
    """
    for row in REPLACED[part]:
        _replace(row, importlib.import_module(row.module), given)


def apply_on_import(part: str) -> None:
    """Replace the names of a part when this process imports their modules, if it ever does. Idempotent."""
    for row in REPLACED[part]:
        if (row.module, row.name) not in _awaited:
            _awaited.add((row.module, row.name))
            after_import(row.module, partial(_replace, row, given={}))


@contextmanager
def applied(part: str, **given: Any) -> Iterator[None]:
    """Replace the names of a part within, for this whole process."""
    apply(part, **given)
    try:
        yield
    finally:
        for row in REPLACED[part]:
            owner, name = _owner(row, importlib.import_module(row.module))
            setattr(owner, name, _stock[row.module, row.name])


def _replace(row: Replacement, module: ModuleType, given: Mapping[str, Any]) -> None:
    place = row.module, row.name
    owner, name = _owner(row, module)
    present = getattr(owner, name, None)
    if place not in _ours or present is not _ours[place]:
        _stock[place] = present
    value = _named(row.by) if ":" in row.by else given[row.by]
    if row.wraps:
        value = value(_stock[place], **given) if ":" in row.by else value(_stock[place])
    _ours[place] = value
    setattr(owner, name, value)


def _owner(row: Replacement, module: ModuleType) -> tuple[Any, str]:
    *classes, name = row.name.split(".")
    return reduce(getattr, classes, module), name


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)

# SPDX-License-Identifier: Apache-2.0
"""The steps in the order in which a run depends on them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .figures import of_copies, of_delivery, of_engine, of_environment, of_job, of_ladder, of_weight_updates
from .steps import CheckStep, Options, lacking, logs_of

ARENA = ("torch", "msgspec", "numpy", "psutil", "xxhash")
"""Modules of the steps without verl: torch, and requirements of this package that are installed with it."""
RUN = (*ARENA, "verl", "ray", "vllm", "transformers", "hydra", "omegaconf", "pyarrow")
"""Modules of a training run."""
OWN = (sys.executable, "-m", "recipe.async_pipeline")
JOB_STEPS = 20
UNTRAINED_STEPS = 5
UNTRAINED = ("qwen2", "qwen3", "experts")
"""Models of `toy.untrained`: engines take another path for each of them."""
SIZES = {"cuda": "1", "cpu": "0.06"}
"""GiB of weights for the copies."""
UPDATED = {"cuda": "500M", "cpu": "2M"}
"""Parameters of the model whose weight updates are measured."""
TOLERANCES = {"cuda": "1e-3", "cpu": "1e-5"}
"""Of the ladder: kernels of GPUs add up in an order that depends on the batch."""
EXACT = {
    "cuda": (
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        # The sync trainer generates on the devices that train, which may be fewer.
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ),
    "cpu": (
        # verl's loader cannot repair what vLLM's layers repack on a CPU; this package's can.
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
        "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension",
    ),
}
"""Settings with which two trainers can be compared, by device."""


def missing_for_job(options: Options) -> str | None:
    """Return why no training run can start, or None."""
    if options.device == "cuda" and options.devices < 2:
        return f"training and generation need a device each, but there is {options.devices}"
    if not (options.configs / "train.yaml").exists():
        return f"the configs are not in {options.configs}; run it from a clone of the repository"
    return None


def engine_of() -> str | None:
    """Return the installed engine, or None."""
    return next((name for name in ("vllm", "sglang") if lacking([name]) is None), None)


def missing_for_engine(options: Options) -> str | None:
    """Return why no engine can be loaded, or None."""
    if options.device != "cuda":
        return lacking(RUN)  # engines on a CPU get the arguments of a run
    if engine_of() is None:
        return "needs vllm or sglang"
    return lacking(RUN) if engine_of() == "vllm" else None


def missing_for_weight_updates(options: Options) -> str | None:
    """Return why weight updates of real engines cannot be measured, or None."""
    if options.device == "cuda" and lacking(["cupy"]) is not None:
        return "needs cupy, with which verl's manager sends weights between devices"
    return missing_for_job(options)


def environment(options: Options, written: Path) -> Sequence[str]:
    return ("bash", "-c", 'set -o pipefail; "${@:2}" | tee "$1"', "-", str(written), *OWN, "doctor", "--json")


def copies(options: Options, written: Path) -> Sequence[str]:
    # The module itself: `async-pipeline bench` imports what the other measurements need.
    module = (sys.executable, "-m", "recipe.async_pipeline.lab.bench.arena")
    sizes = ("--sizes", SIZES[options.device], "--versions", "5", "--device", options.device)
    return (*module, *sizes, "--json", str(written))


def delivery(options: Options, written: Path) -> Sequence[str]:
    ranks = str(max(1, options.devices))
    module = (sys.executable, "-m", "recipe.async_pipeline.lab.gpu_kit.delivery")
    return (*module, "--device", options.device, "--ranks", ranks, "--json", str(written))


def engine(options: Options, written: Path) -> Sequence[str]:
    folder = models_folder(options)
    module = (sys.executable, "-m", "recipe.async_pipeline.lab.gpu_kit.engine_check")
    ranks = ("--ranks", "2" if options.devices > 1 else "1", "--device", options.device)
    models = [str(folder / name) for name in UNTRAINED]
    check = (*module, *models, "--engine", str(engine_of()), *ranks, "--json", str(written))
    return with_models(folder, UNTRAINED, check)


def models_folder(options: Options) -> Path:
    """Return where the untrained models of the kit are."""
    return options.folder / "models"


def with_models(folder: Path, names: Sequence[str], command: Sequence[str]) -> Sequence[str]:
    """Return a command that writes untrained models first."""
    made = (sys.executable, "-m", "recipe.async_pipeline.lab.tasks.untrained", str(folder), *names)
    count = str(len(made) + 1)
    return ("bash", "-c", f'"${{@:1:{len(made)}}}" && exec "${{@:{count}}}"', "-", *made, *command)


def qwen3_job(options: Options, written: Path) -> Sequence[str]:
    return untrained_job(options, written, "qwen3")


def experts_job(options: Options, written: Path) -> Sequence[str]:
    return untrained_job(options, written, "experts")


def untrained_job(options: Options, written: Path, name: str) -> Sequence[str]:
    """Return the command of a run of few steps with one of the kit's models, which learns nothing."""
    folder = models_folder(options)
    few = f"trainer.total_training_steps={UNTRAINED_STEPS}"
    model = f"actor_rollout_ref.model.path={folder / name}"
    return with_models(folder, [name], training(options, written, "vllm", few, model))


def job(options: Options, written: Path) -> Sequence[str]:
    return training(options, written, "vllm")


def megatron_job(options: Options, written: Path) -> Sequence[str]:
    engine = "training_engine=megatron" if options.device == "cpu" else "model_engine=megatron"
    return training(options, written, "vllm", engine)


def weight_updates(options: Options, written: Path) -> Sequence[str]:
    sizes = ("--params", UPDATED[options.device], "--replicas", "1", "--versions", "3")
    logs = str(logs_of(written.stem, options))
    bench = (*OWN, "bench", "weight-sync", "--device", options.device, *sizes, "--json", str(written))
    return ("bash", "-c", 'rm -rf "$1" && exec "${@:2}" --logs "$1"', "-", logs, *bench)


def ladder(options: Options, written: Path) -> Sequence[str]:
    folder = options.folder / f"{written.stem}-runs"
    compare = (sys.executable, "-m", "recipe.async_pipeline.lab.gpu_kit.ladder", "--folder", str(folder))
    limits = ("--tolerance", TOLERANCES[options.device], "--json", str(written))
    settings = (*task_settings(options), *EXACT[options.device])
    task = f"ASYNC_PIPELINE_TASK={options.task()}"
    return ("env", task, *compare, *limits, "--", *hydra_options(options), *settings)


def training(options: Options, written: Path, engine: str, *more: str) -> Sequence[str]:
    """Return the command of a short run, whose summary becomes the figures."""
    run_dir = options.folder / f"{written.stem}-run"
    settings = (
        *task_settings(options),
        f"actor_rollout_ref.rollout.name={engine}",
        f"trainer.total_training_steps={JOB_STEPS}",
        f"trainer.v1.async_pipeline.run_dir={run_dir}",
        *more,
    )
    switched_on = (*hydra_options(options), "+async_pipeline=True")
    run = (sys.executable, "-m", "verl.trainer.main_ppo", *switched_on, *settings)
    # On success only: a run that fails has a summary too.
    copied = '"${@:3}" && cp "$1" "$2"'
    task = f"ASYNC_PIPELINE_TASK={options.task()}"
    files = (str(run_dir / "summary.json"), str(written))
    return ("env", task, "bash", "-c", copied, "-", *files, *OWN, "watch", "--", *run)


def hydra_options(options: Options) -> tuple[str, ...]:
    """Return the options of hydra that choose the configuration."""
    name = "smoke_cpu" if options.device == "cpu" else "train"
    return ("--config-path", str(options.configs), "--config-name", name)


def task_settings(options: Options) -> tuple[str, ...]:
    """Return what the small task changes in the configuration."""
    if options.device == "cuda":
        return on_gpus(options)
    return (f"actor_rollout_ref.model.path={options.model}",) if options.model else ()


def on_gpus(options: Options) -> tuple[str, ...]:
    """Return the settings of the toy task on GPUs: half of the devices train, at most eight of each half."""
    task = options.task()
    training_devices = min(8, options.devices // 2)
    generation = min(8, options.devices - training_devices)
    parallel = 2 if generation % 2 == 0 else 1
    return (
        f"actor_rollout_ref.model.path={options.model or task / 'model'}",
        f"data.train_files={task / 'train.parquet'}",
        f"data.val_files={task / 'val.parquet'}",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        f"actor_rollout_ref.rollout.n_gpus_per_node={generation}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}",
        f"trainer.n_gpus_per_node={training_devices}",
        "reward.custom_reward_function.path=pkg://recipe.async_pipeline.lab.tasks.reward",
    )


STEPS: tuple[CheckStep, ...] = (
    CheckStep(
        name="environment",
        shows="pins, patches, devices and shared memory are as a run requires",
        limit_s=120.0,
        command=environment,
        figures=of_environment,
    ),
    CheckStep(
        name="copies",
        shows="weights move at the speed of the link, and a commit on the device serves them",
        limit_s=300.0,
        command=copies,
        needs=ARENA,
        figures=of_copies,
    ),
    CheckStep(
        name="delivery",
        shows="FSDP2 ranks publish their shards bit by bit, each version is proved, a bad load is refused",
        limit_s=300.0,
        command=delivery,
        needs=ARENA,
        figures=of_delivery,
    ),
    CheckStep(
        name="engine",
        shows="the engine alone gets versions of a Qwen2, a Qwen3 and a mixture of experts while it answers; "
        "each is proved, and the version of each token is recorded",
        limit_s=1200.0,
        command=engine,
        needs=("torch", "transformers"),
        missing=missing_for_engine,
        figures=of_engine,
    ),
    CheckStep(
        name="ladder",
        shows="on_policy trains what verl's sync trainer trains, up to rounding",
        limit_s=1200.0,
        command=ladder,
        needs=RUN,
        missing=missing_for_job,
        figures=of_ladder,
    ),
    CheckStep(
        name="job",
        shows=f"{JOB_STEPS} steps of asynchronous RL with FSDP2 and vLLM, every version proved",
        limit_s=1200.0,
        command=job,
        needs=RUN,
        missing=missing_for_job,
        figures=of_job,
    ),
    CheckStep(
        name="qwen3",
        shows=f"{UNTRAINED_STEPS} steps with a Qwen3, every version proved",
        limit_s=1200.0,
        command=qwen3_job,
        needs=RUN,
        missing=missing_for_job,
        figures=of_job,
    ),
    CheckStep(
        name="experts",
        shows=f"{UNTRAINED_STEPS} steps with a mixture of experts, every version proved",
        limit_s=1200.0,
        command=experts_job,
        needs=RUN,
        missing=missing_for_job,
        figures=of_job,
    ),
    CheckStep(
        name="megatron",
        shows=f"{JOB_STEPS} steps of asynchronous RL with Megatron and vLLM",
        limit_s=1200.0,
        command=megatron_job,
        needs=(*RUN, "megatron.core"),
        missing=missing_for_job,
        figures=of_job,
    ),
    CheckStep(
        name="weight-updates",
        shows="stalls of a weight update, and of verl's manager in the same run",
        limit_s=1200.0,
        command=weight_updates,
        needs=RUN,
        missing=missing_for_weight_updates,
        figures=of_weight_updates,
    ),
)

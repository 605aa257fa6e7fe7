# SPDX-License-Identifier: Apache-2.0
"""Choose the checkpoint that a run resumes from, before anything is started.

trainer.resume_mode selects it:

    auto           the newest usable checkpoint, or a fresh start if there is no checkpoint
    resume_path    the checkpoint in trainer.resume_from_path, or an error
    disable        a fresh start
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ..config.checks.teachers import LOSS
from ..config.keys.older_verl import WHOLE
from ..config.knobs.fields import knobs_of
from ..config.knobs.schema import AsyncPipelineConfig
from ..config.paths import OWN, select
from ..config.placement import Placement
from ..errors import CheckpointError, ConfigError
from ..observe.run_directory.run_files import last_number, run_of
from ..redaction import without_secrets
from .store import FoundCheckpoint, newest, next_epoch, sweep, verify

MODES = ("auto", "disable", "resume_path")
STATE, LEDGER = "pipeline.json", "ledger.jsonl"


class Origin(NamedTuple):
    """The run's identity and the checkpoint that it starts from."""

    run: str
    """The run's name, kept across resumes."""
    identity: Mapping[str, str]
    root: Path
    """The folder for its checkpoints."""
    epoch: int
    """Number of the process, by which its checkpoints are newer than all that are there."""
    found: FoundCheckpoint | None
    """The checkpoint to resume from; None for a fresh start."""


def saves(config: Mapping[str, Any]) -> bool:
    """Return whether a run with this config of verl writes checkpoints; if not, it must not touch any."""
    return bool((select(config, "trainer.save_freq") or -1) > 0)


def root_of(config: Mapping[str, Any]) -> Path:
    """Return the absolute path of the folder for checkpoints."""
    return Path(str(select(config, "trainer.default_local_dir"))).expanduser().resolve()


def check_keys(config: Mapping[str, Any]) -> None:
    """Validate verl's checkpoint and resume keys.

    Raises ConfigError with all that have an illegal value or contradict another.
    """
    if problems := [*_problems_of_keys(config)]:
        raise ConfigError(*problems)


def _problems_of_keys(config: Mapping[str, Any]) -> Iterator[str]:
    mode, path = select(config, "trainer.resume_mode"), select(config, "trainer.resume_from_path")
    if mode not in MODES:
        yield f"trainer.resume_mode must be one of {', '.join(MODES)}, got {mode!r}; auto is the default"
    elif mode == "resume_path" and not isinstance(path, str):
        yield (
            "trainer.resume_from_path must be a folder global_step_N with resume_mode=resume_path, got "
            f"{path!r}; set it"
        )
    elif mode != "resume_path" and path is not None:
        yield (
            f"trainer.resume_from_path must be left out with resume_mode={mode}, got {path!r}; set "
            "resume_mode=resume_path to resume from it"
        )
    for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        keep = select(config, f"trainer.{name}")
        if keep is not None and not (_is_integer(keep) and keep >= 1):
            yield f"trainer.{name} must be >= 1, or null to keep all, got {keep!r}; correct it"
    every = select(config, "trainer.save_freq")
    if not _is_integer(every) or every < -1:
        yield (
            f"trainer.save_freq must be a number of steps, or -1 for no checkpoints, got {every!r}; set it "
            "to -1 or more"
        )
        return
    notice_s = select(config, f"{OWN}.faults.notice_s")
    if notice_s and every <= 0:
        yield (
            f"{OWN}.faults.notice_s={notice_s!r} requires checkpoints, got trainer.save_freq={every}; set "
            "trainer.save_freq to 1 or more"
        )
    if every > 0:
        for model in ("actor_rollout_ref.actor", "critic"):
            yield from _problems_of_contents(config, f"{model}.checkpoint", loads=mode != "disable")
        yield from _problems_of_root(str(select(config, "trainer.default_local_dir")))


def _problems_of_root(root: str) -> Iterator[str]:
    """Yield why no checkpoint can be written to `root`. Creates nothing."""
    path = Path(root).expanduser().resolve()
    # Not `Path.exists`: it raises if a parent folder is not searchable.
    existing = next(above for above in (path, *path.parents) if os.path.exists(above))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield (
            f"trainer.default_local_dir must be a writable folder with save_freq above 0, got {root}, where "
            f"{existing} is not; set another folder"
        )


def _problems_of_contents(config: Mapping[str, Any], path: str, *, loads: bool) -> Iterator[str]:
    """Yield where verl's `save_contents` or `load_contents` omits what an exact resume needs."""
    for name in ("save_contents", "load_contents") if loads else ("save_contents",):
        parts = select(config, f"{path}.{name}")
        if parts is not None and not set(WHOLE) <= set(parts):
            yield (
                f"{path}.{name} must include {', '.join(WHOLE)} for an exact resume, got {parts!r}; "
                "leave it out"
            )
    if select(config, f"{path}.async_save"):
        yield (
            f"{path}.async_save must be False, got True; a checkpoint is published only once all of it "
            "is on disk"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_ledger(run_dir: Path, found: FoundCheckpoint) -> None:
    """Raise CheckpointError if the run's ledger ends before the checkpoint that the run resumes from.

    A ledger of another run is ignored.
    """
    ledger = run_dir / LEDGER
    if run_of(ledger) != found.manifest.run:
        return

    seen, last = _last_record_of(found.folder), last_number(ledger)
    if last < seen:
        raise CheckpointError(
            f"{ledger} ends at record {last}, but {found.folder.name} was made after record {seen}: its end "
            "is lost; restore the whole file, or move it away to have the run start a new one"
        )


def _last_record_of(checkpoint: Path) -> int:
    """Return the number of the last ledger record that the checkpoint covers."""
    state = json.loads((checkpoint / STATE).read_bytes())
    return int(state["flow"]["ledger"]["number"])


def origin_of(
    config: Mapping[str, Any],
    knobs: AsyncPipelineConfig,
    placement: Placement,
    verl: str,
    run_dir: Path,
    say: Callable[[str], object],
) -> Origin:
    """Return where the run starts. `config` is verl's, resolved; `say` receives one line per refusal.

    With resume_mode=auto, a run whose run directory holds a ledger resumes from checkpoints of that
    ledger's run only.

    Raises CheckpointError if the checkpoint in trainer.resume_from_path cannot be used, ConfigError if
    resume_mode=auto finds checkpoints but none that can be used.
    """
    root = root_of(config)
    identity = identity_of(config, knobs, placement, verl)

    found = _found(
        config,
        root,
        identity,
        run_of(run_dir / LEDGER),
        say,
        contents=knobs.faults.verify_checkpoint_at_start,
    )

    run = f"{time.time():.0f}-{uuid.uuid4().hex[:8]}" if found is None else found.manifest.run
    if saves(config):
        sweep(root)
    return Origin(run, identity, root, next_epoch(root), found)


def _found(
    config: Mapping[str, Any],
    root: Path,
    identity: Mapping[str, str],
    run: str | None,
    say: Callable[[str], object],
    *,
    contents: bool,
) -> FoundCheckpoint | None:
    mode = select(config, "trainer.resume_mode")
    if mode == "auto":
        return newest(root, identity, run, say, contents=contents)
    if mode == "disable":
        return None

    folder = Path(str(select(config, "trainer.resume_from_path"))).expanduser().resolve()
    try:
        return FoundCheckpoint(folder, verify(folder, identity, contents=contents))
    except CheckpointError as error:
        raise CheckpointError(f"trainer.resume_from_path is refused: {error}") from None


def identity_of(
    config: Mapping[str, Any], knobs: AsyncPipelineConfig, placement: Placement, verl: str
) -> Mapping[str, str]:
    """Return the settings that must not change when a run is resumed, by the name of their key.

    Of this package's knobs, all that do not declare that they may.
    """
    train, critic = placement.pool_of("train"), placement.pool_of("critic")
    same = (
        "trainer.project_name",
        "data.train_batch_size",
        # The dataloader's state is of these.
        "data.shuffle",
        "data.dataloader_num_workers",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.strategy",
    )
    model = "actor_rollout_ref.model"
    added = [f"{model}.lora_rank", f"{model}.lora.rank"]
    if select(config, "distillation.enabled"):
        # The columns of finished groups.
        added += ["distillation.enabled", f"{LOSS}.loss_mode", f"{LOSS}.topk"]

    return {
        **{path: str(select(config, path)) for path in same},
        **{path: str(value) for path in added if (value := select(config, path))},
        **_sizes_of_megatron(config),
        **{
            f"{OWN}.{knob.path}": without_secrets(str(attrgetter(knob.path)(knobs)))
            for knob in knobs_of(AsyncPipelineConfig)
            if not knob.may_change
        },
        "actor_rollout_ref.model.path": model_of(str(select(config, "actor_rollout_ref.model.path"))),
        "the number of training devices": str(0 if train is None else train.devices),
        "the number of the critic's devices": str(0 if critic is None else critic.devices),
        "verl": verl,
    }


def _sizes_of_megatron(config: Mapping[str, Any]) -> dict[str, str]:
    """Return Megatron's parallel sizes, by which its checkpoints are cut, or nothing with another engine."""
    if select(config, "actor_rollout_ref.actor.strategy") != "megatron":
        return {}
    section = "actor_rollout_ref.actor.megatron"
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    paths = [f"{section}.{name}_parallel_size" for name in names]
    return {path: str(select(config, path)) for path in paths}


def model_of(path: str) -> str:
    """Return a fingerprint of a model's configuration and of its tensors' names and shapes.

    A path that is not a local model folder is returned as it is.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return path
    digest = xxhash.xxh3_64((folder / "config.json").read_bytes())
    for part in _headers(folder):
        digest.update(part)
    return f"the model {digest.hexdigest()}"


def _headers(folder: Path) -> Iterator[bytes]:
    """Yield the header of each safetensors file, which holds names, types and shapes."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            yield stream.read(int.from_bytes(stream.read(8), "little"))

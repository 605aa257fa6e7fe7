# SPDX-License-Identifier: Apache-2.0
"""From which checkpoint a run goes on, decided before anything is started.

trainer.resume_mode      auto: the newest that can be used, or from the beginning where there is none;
                         resume_path: the one in trainer.resume_from_path, or an error; disable: from the
                         beginning.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ..config.paths import select
from ..config.placement import Placement
from ..config.schema import OWN, AsyncPipelineConfig
from ..errors import CheckpointError, ConfigError
from ..observe.run_files import last_number, run_of
from .store import Found, newest, sweep, verify

MODES = ("auto", "disable", "resume_path")
WHOLE = ("model", "optimizer", "extra")
"""verl's names for the parts of a checkpoint."""
STATE, LEDGER = "pipeline.json", "ledger.jsonl"


class Origin(NamedTuple):
    """Where a run begins."""

    run: str
    """Its name, which it keeps however often it is resumed."""
    identity: Mapping[str, str]
    root: Path
    """Where its checkpoints go."""
    found: Found | None
    """None: it begins from the beginning."""


def check_keys(config: Mapping[str, Any]) -> None:
    """Raises ConfigError: the keys of verl that say from where contradict each other."""
    mode, path = select(config, "trainer.resume_mode"), select(config, "trainer.resume_from_path")
    if mode not in MODES:
        raise ConfigError(
            f"trainer.resume_mode must be one of {', '.join(MODES)}, got {mode!r}; auto is the default"
        )
    if mode == "resume_path" and not (isinstance(path, str) and Path(path).expanduser().is_dir()):
        raise ConfigError(
            "trainer.resume_from_path must be a folder global_step_N with resume_mode=resume_path, got "
            f"{path!r}; set it"
        )
    if mode != "resume_path" and path is not None:
        raise ConfigError(
            f"trainer.resume_from_path must be left out with resume_mode={mode}, got {path!r}; set "
            "resume_mode=resume_path to go on from there"
        )
    every = -1 if select(config, "trainer.save_freq") is None else select(config, "trainer.save_freq")
    if not _whole(every) or every < -1:
        raise ConfigError(
            f"trainer.save_freq must be a number of steps, or -1 for no checkpoints, got {every!r}; set it "
            "to -1 or more"
        )
    for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        keep = select(config, f"trainer.{name}")
        if keep is not None and not (_whole(keep) and keep >= 1):
            raise ConfigError(f"trainer.{name} must be >= 1, or null to keep all, got {keep!r}; correct it")
    for model in ("actor_rollout_ref.actor", "critic"):
        _check_contents(config, f"{model}.checkpoint", saves=every > 0, loads=mode != "disable")
    if every > 0:
        _check_root(str(select(config, "trainer.default_local_dir")))


def _check_root(root: str) -> None:
    """Raises ConfigError: no checkpoint can be written there. Makes nothing."""
    path = Path(root).expanduser().resolve()
    # `Path.exists` raises where a folder above must not be looked into.
    there = next(above for above in (path, *path.parents) if os.path.exists(above))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            "trainer.default_local_dir must be a folder that can be written to with save_freq above 0, "
            f"got {root}, where {there} cannot; name another"
        )


def _check_contents(config: Mapping[str, Any], path: str, *, saves: bool, loads: bool) -> None:
    """Raises ConfigError: verl's key for parts of a checkpoint leaves out what an exact resume needs."""
    for name, matters in (("save_contents", saves), ("load_contents", saves and loads)):
        parts = select(config, f"{path}.{name}")
        if matters and parts is not None and not set(WHOLE) <= set(parts):
            raise ConfigError(
                f"{path}.{name} must have {', '.join(WHOLE)}, without which no run goes on exactly, got "
                f"{parts!r}; leave it out"
            )
    if saves and select(config, f"{path}.async_save"):
        raise ConfigError(
            f"{path}.async_save must be False, got True; a checkpoint is published when all of it has "
            "reached the disk"
        )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_ledger(run_dir: Path, found: Found) -> None:
    """Raises CheckpointError: the run's ledger ends before the checkpoint that the run is to go on from."""
    ledger = run_dir / LEDGER
    if run_of(ledger) != found.manifest.run:
        return
    seen, last = _seen_by(found.folder), last_number(ledger)
    if last < seen:
        raise CheckpointError(
            f"{ledger} ends at record {last}, but {found.folder.name} was made after record {seen}: its "
            "end is lost; "
            "put the whole file back, or move it away, and the run begins another one"
        )


def _seen_by(checkpoint: Path) -> int:
    """The number of the last record of the ledger that a checkpoint has seen."""
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
    """`config`: verl's, resolved; `say` hears of each checkpoint that is refused.

    By itself a run goes on from its own checkpoints only, if the run directory has the ledger of one.

    Raises ConfigError, CheckpointError: the one that was asked for cannot be used.
    """
    root = Path(str(select(config, "trainer.default_local_dir"))).expanduser().resolve()
    identity = identity_of(config, knobs, placement, verl)
    found = _found(config, root, identity, run_of(run_dir / LEDGER), say)
    run = f"{time.time():.0f}-{uuid.uuid4().hex[:8]}" if found is None else found.manifest.run
    sweep(root)
    return Origin(run, identity, root, found)


def _found(
    config: Mapping[str, Any],
    root: Path,
    identity: Mapping[str, str],
    run: str | None,
    say: Callable[[str], object],
) -> Found | None:
    mode = select(config, "trainer.resume_mode")
    if mode == "auto":
        return newest(root, identity, run, say)
    if mode == "disable":
        return None
    folder = Path(str(select(config, "trainer.resume_from_path"))).expanduser().resolve()
    try:
        return Found(folder, verify(folder, identity))
    except CheckpointError as error:
        raise CheckpointError(f"trainer.resume_from_path is refused: {error}") from None


def identity_of(
    config: Mapping[str, Any], knobs: AsyncPipelineConfig, placement: Placement, verl: str
) -> Mapping[str, str]:
    """What has to stay as it is from one process of a run to the next, by the name of its key."""
    train, critic = placement.pool_of("train"), placement.pool_of("critic")
    same = (
        "trainer.project_name",
        "data.train_batch_size",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.strategy",
    )
    return {
        **{path: str(select(config, path)) for path in same},
        f"{OWN}.strategy": knobs.strategy,
        f"{OWN}.max_lag": str(knobs.max_lag),
        f"{OWN}.oldest_share": f"{knobs.oldest_share:g}",
        f"{OWN}.ref_refresh_every": str(knobs.ref_refresh_every),
        "actor_rollout_ref.model.path": model_of(str(select(config, "actor_rollout_ref.model.path"))),
        "the number of training devices": str(0 if train is None else train.devices),
        "the number of the critic's devices": str(0 if critic is None else critic.devices),
        "verl": verl,
    }


def model_of(path: str) -> str:
    """What tells a model from others: its configuration, and names and shapes of its tensors. Else its
    name.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return path
    digest = xxhash.xxh3_64((folder / "config.json").read_bytes())
    for part in _headers(folder):
        digest.update(part)
    return f"the model {digest.hexdigest()}"


def _headers(folder: Path) -> Iterator[bytes]:
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            yield stream.read(int.from_bytes(stream.read(8), "little"))

# SPDX-License-Identifier: Apache-2.0
"""Check what a run reads before Ray starts: data, models, the tokenizer, accounts of trackers, its engine.

The trainer's process would find the same faults after a minute, each with a long traceback. It may run on
another machine, for a plan and on a Ray cluster: then, what is only missing here (`InputFault.absent`) is a
note.
"""

from __future__ import annotations

import glob
import json
import netrc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from huggingface_hub import constants

from ...config.adapters import adapter_rank
from ...config.batch_sizes import BATCH
from ...config.paths import hint, select
from ...config.training_engine import OTHERS
from ..reward.default_function import uses_default, verl_knows
from ..rules.megatron_rules import makes_adapters
from ..rules.model_rules import HUB_NAME, cached_config
from .chat_check import in_a_line, why_no_chat
from .light_verl import registered_agent_loops

SOURCE, AGENT = "data_source", "agent_name"
"""Columns: what the reward function of a row is, and the agent loop."""
SCORER = "set reward.custom_reward_function.path"
MODEL, PROMPT_KEY, LOGGER = "actor_rollout_ref.model", "data.prompt_key", "trainer.logger"
FILES = {"train": "data.train_files", "val": "data.val_files"}
FORMATS = (".parquet", ".json", ".jsonl")
"""What verl's data set reads."""
WHOLE_JSON_BYTES = 64 << 20
"""A larger JSON file that is one array is not read here."""


class InputFault(NamedTuple):
    """What a run could not read."""

    problem: str
    """The line of an error."""
    absent: str = ""
    """What is missing here but may exist where the run will be; empty if the fault is in the thing itself."""


def faults(
    config: Mapping[str, Any], *, critic: bool, images: bool, scored: bool = False
) -> Iterator[InputFault]:
    """Yield what a run with this resolved config of verl could not read.

    `critic`: it has one. `images`: its policy draws pictures, so that it has no chat. `scored`: its episodes
    come with rewards.
    """
    yield from _faults_of_data(config, scored=scored or images)
    # `diffusers_rules` reads a pipeline of diffusers.
    models = [] if images else [f"{MODEL}.path"]
    models += ["critic.model.path"] if critic and not images else []
    models += ["reward.reward_model.model_path"] if select(config, "reward.reward_model.enable") else []
    for key in models:
        yield from _faults_of_model(key, str(select(config, key)))
    if not images:
        yield from _faults_of_tokenizer(config)
    yield from _faults_of_trackers(config)
    yield from _faults_of_engine(config)


# The training engine.


def _faults_of_engine(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check what verl imports when it makes the engine; its FSDP and Megatron are checked elsewhere."""
    key = "actor_rollout_ref.actor.strategy"
    strategy = str(select(config, key))
    if strategy in OTHERS and find_spec(strategy) is None:
        yield InputFault(
            f"{key} must be an installed engine, got {strategy!r}; install {strategy}, or use fsdp2",
            f"the package {strategy}, which is not installed here",
        )
    if strategy == "megatron" and adapter_rank(config) and not makes_adapters():
        yield InputFault(
            f"{MODEL}.lora.rank must be 0 with the installed megatron-bridge, got {adapter_rank(config)}; "
            "install one with peft.utils.create_peft, newer than 0.3.1, or use fsdp2",
            "adapters of Megatron, for which the installed megatron-bridge is too old",
        )


# Data.


class _Contents(NamedTuple):
    rows: int | None
    columns: Sequence[str] | None
    sources: Sequence[str] = ()
    """Values of the column `data_source`; of a JSON file, the first one."""


def _faults_of_data(config: Mapping[str, Any], *, scored: bool) -> Iterator[InputFault]:
    """Check the files of verl's own data set; a custom one may take anything."""
    if select(config, "data.custom_cls.path"):
        return
    batch = int(select(config, BATCH))
    for kind, key in FILES.items():
        value = select(config, key)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
            yield InputFault(f"{key} must be a file or a list of files, got {value!r}; name at least one")
            continue
        found: list[_Contents] = []
        wrong: list[InputFault] = []
        for name in names:
            for file in [name] if "://" in name else _expanded(name):
                contents = _contents_of(key, file, config, batch)
                wrong += [contents] if isinstance(contents, InputFault) else []
                found += [] if isinstance(contents, InputFault) else [contents]
        yield from wrong
        rows = [contents.rows for contents in found]
        if not wrong and None not in rows:
            total = sum(row for row in rows if row is not None)
            most = select(config, f"data.{kind}_max_samples")
            total = min(total, most) if isinstance(most, int) and most > 0 else total
            yield from _faults_of_size(key, kind, total, batch)
        if not scored and (kind == "train" or _validates(config)):
            yield from _faults_of_sources(key, config, found)


def _validates(config: Mapping[str, Any]) -> bool:
    return bool(select(config, "trainer.val_before_train")) or (select(config, "trainer.test_freq") or 0) > 0


def _faults_of_sources(
    key: str, config: Mapping[str, Any], found: Sequence[_Contents]
) -> Iterator[InputFault]:
    """Check that verl's reward function knows the data, if it scores the run and each row is verl's."""
    loop = select(config, "actor_rollout_ref.rollout.agent.default_agent_loop")
    if loop not in registered_agent_loops() or not uses_default(config):
        return
    for contents in found:
        if AGENT in (contents.columns or ()):
            continue
        if contents.columns is not None and SOURCE not in contents.columns:
            yield InputFault(f"{key} must have the column {SOURCE}, got none; {SCORER}, and add the column")
            return
        if unknown := [source for source in contents.sources if not verl_knows(source)]:
            yield InputFault(
                f"{key} must have data sources that verl's reward function knows, got {unknown[0]!r}; "
                f"{SCORER}"
            )
            return


def _faults_of_size(key: str, kind: str, rows: int, batch: int) -> Iterator[InputFault]:
    if kind == "train" and rows < batch:
        yield InputFault(
            f"{key} must have at least {BATCH}={batch} rows, with data.train_max_samples, got {rows}; "
            "lower the batch size, or add data: a run would end after 0 steps"
        )
    if kind == "val" and not rows:
        yield InputFault(f"{key} must have a row, got 0; validate on other data")


def _expanded(name: str) -> list[str]:
    """Return the files that a pattern stands for, or the name if it is none or nothing matches."""
    return sorted(glob.glob(name)) or [name] if glob.has_magic(name) and not Path(name).exists() else [name]


def _contents_of(key: str, name: str, config: Mapping[str, Any], enough: int) -> _Contents | InputFault:
    """Return the rows (at least, if there are `enough`) and columns of a data file, or its fault."""
    if not name.endswith(FORMATS):
        return InputFault(f"{key} must end in {', '.join(FORMATS)}, got {name!r}; convert it")
    if "://" in name:
        return _Contents(None, None)
    path = Path(name)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no file"
        home = "; write the home folder out" if name.startswith("~") else "; correct the path"
        return InputFault(
            f"{key} must name files, got {name!r}, where there is {what}{home}",
            f"{key}={name}, which is not on this machine",
        )
    try:
        contents = _read_parquet(path) if name.endswith(".parquet") else _read_json(path, enough)
    except (OSError, ValueError) as error:  # Arrow's errors are among them
        return InputFault(f"{key} cannot be read: {name}: {in_a_line(error)}; make the file again")
    prompt = str(select(config, PROMPT_KEY) or "prompt")
    if contents.columns is not None and prompt not in contents.columns:
        return InputFault(
            f"{PROMPT_KEY} must be a column of {key}, got {prompt!r}{hint(prompt, contents.columns)}; "
            f"{name} has {', '.join(contents.columns) or 'none'}"
        )
    return contents


def _read_parquet(path: Path) -> _Contents:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        rows, names = file.metadata.num_rows, file.schema_arrow.names
    if SOURCE not in names:
        return _Contents(rows, names)
    with parquet.ParquetFile(path, read_dictionary=[SOURCE]) as file:
        chunks = file.read([SOURCE])[SOURCE].chunks
    values = (getattr(chunk, "dictionary", chunk).to_pylist() for chunk in chunks)
    return _Contents(rows, names, list(dict.fromkeys(map(str, chain.from_iterable(values)))))


def _read_json(path: Path, enough: int) -> _Contents:
    with path.open("rb") as file:
        if file.read(1) == b"[":
            rows = json.loads(path.read_bytes()) if path.stat().st_size <= WHOLE_JSON_BYTES else None
            return _Contents(None if rows is None else len(rows), None)
        file.seek(0)
        lines = (line for line in file if line.strip())
        first = next(lines, b"")
        if not first:
            return _Contents(0, None)
        row = json.loads(first)
        rest = sum(1 for line, _ in zip(lines, range(enough), strict=False))
        if not isinstance(row, Mapping):
            return _Contents(1 + rest, None)
        return _Contents(1 + rest, list(row), [str(row[SOURCE])] if SOURCE in row else [])


# Models.


def _faults_of_model(key: str, name: str) -> Iterator[InputFault]:
    """Check that a model is a folder with a configuration and all its files, or may be one of the Hub."""
    if "://" in name:
        return
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield InputFault(
                f"{key} must be a folder with a config.json, got {name!r}, which has none; correct it"
            )
        elif missing := [one for one in _listed_weights(folder) if not (folder / one).is_file()]:
            yield InputFault(
                f"{key} must have all files of its index, got {name!r}, which lacks {len(missing)}, e.g. "
                f"{missing[0]}; copy or download it again"
            )
        return
    note = f"{key}={name}, which is not on this machine"
    if not HUB_NAME.fullmatch(name):
        yield InputFault(
            f"{key} must be a model's folder or its name on the Hub, got {name!r}; correct it", note
        )
    elif constants.HF_HUB_OFFLINE and cached_config(name) is None:
        yield InputFault(
            f"{key} must be on this machine with HF_HUB_OFFLINE=1, got {name!r}, which is neither a folder "
            "nor in the Hub's cache; correct it, or download the model",
            note,
        )


def _listed_weights(folder: Path) -> Iterator[str]:
    """Yield the names of the files that the index of a model's weights lists."""
    for index in folder.glob("*.safetensors.index.json"):
        try:
            yield from sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue


def _faults_of_tokenizer(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check that the agent loops can write a conversation; skip code of the model itself."""
    key = f"{MODEL}.tokenizer_path" if select(config, f"{MODEL}.tokenizer_path") else f"{MODEL}.path"
    folder = Path(str(select(config, key))).expanduser()
    if not folder.is_dir() or select(config, f"{MODEL}.trust_remote_code"):
        return
    if not any(folder.glob("*token*")):
        yield InputFault(
            f"{MODEL}.tokenizer_path must name a folder with a tokenizer, got {str(folder)!r}, which has "
            "none; set it"
        )
        return
    kwargs = select(config, "data.apply_chat_template_kwargs") or {}
    template = select(config, f"{MODEL}.custom_chat_template")
    if why := why_no_chat(str(folder), template, json.dumps(kwargs, default=str)):
        yield InputFault(f"{MODEL}.custom_chat_template must be set for the tokenizer in {folder}: {why}")


# Trackers.


class _Tracker(NamedTuple):
    module: str
    has_account: Callable[[], bool] = lambda: True
    remedy: str = ""


def _is_set(*names: str) -> bool:
    return all(os.environ.get(name) for name in names)


def _netrc_has(host: str, *files: Path) -> bool:
    for file in files:
        try:
            if netrc.netrc(file).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _home() -> Path:
    return Path(os.path.expanduser("~"))


def _wandb_knows() -> bool:
    if os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    files = [Path(os.environ["NETRC"])] if _is_set("NETRC") else [_home() / ".netrc", _home() / "_netrc"]
    return _is_set("WANDB_API_KEY") or _is_set("WANDB_IDENTITY_TOKEN_FILE") or _netrc_has(host, *files)


def _swanlab_knows() -> bool:
    mode = os.environ.get("SWANLAB_MODE", "cloud")
    saved = Path(os.environ.get("SWANLAB_SAVE_DIR") or _home() / ".swanlab") / ".netrc"
    return mode != "cloud" or _is_set("SWANLAB_API_KEY") or saved.is_file()


def _clearml_knows() -> bool:
    file = Path(os.environ.get("CLEARML_CONFIG_FILE") or _home() / "clearml.conf")
    return file.is_file() or _is_set("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY")


_VOLC = ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")
TRACKERS: Mapping[str, _Tracker | None] = {
    "console": None,
    "file": None,
    "rl_insight": None,  # off unless VERL_RL_INSIGHT_ENABLE asks for it
    "tensorboard": _Tracker("tensorboard"),
    "trackio": _Tracker("trackio"),
    "mlflow": _Tracker("mlflow"),
    "wandb": _Tracker(
        "wandb", _wandb_knows, "set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
    ),
    "tracking": _Tracker("wandb", _wandb_knows, "set WANDB_API_KEY, or WANDB_MODE=offline"),
    "swanlab": _Tracker("swanlab", _swanlab_knows, "set SWANLAB_API_KEY, or SWANLAB_MODE=local"),
    "clearml": _Tracker("clearml", _clearml_knows, "run `clearml-init`, or set CLEARML_API_ACCESS_KEY"),
    "vemlp_wandb": _Tracker("volcengine_ml_platform", lambda: _is_set(*_VOLC), f"set {', '.join(_VOLC)}"),
}
"""verl's trackers; None for one that needs nothing."""


def _faults_of_trackers(config: Mapping[str, Any]) -> Iterator[InputFault]:
    value = select(config, LOGGER)
    names: Iterable[Any] = [value] if isinstance(value, str) else value or ()
    for name in names:
        if name not in TRACKERS:
            yield InputFault(
                f"{LOGGER} must be of {', '.join(TRACKERS)}, got {name!r}{hint(str(name), TRACKERS)}; "
                "correct it"
            )
            continue
        tracker = TRACKERS[name]
        if tracker is None:
            continue
        if find_spec(tracker.module) is None:
            yield InputFault(
                f"{LOGGER} must have installed trackers, got {name!r} without the package {tracker.module}; "
                "install it, or leave the tracker out",
                f"{LOGGER}={name}, whose package {tracker.module} is not on this machine",
            )
        elif not tracker.has_account():
            yield InputFault(
                f"{LOGGER} must have trackers with credentials, got {name!r} without; {tracker.remedy}",
                f"{LOGGER}={name}, whose credentials are not on this machine",
            )

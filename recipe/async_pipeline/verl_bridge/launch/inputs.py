# SPDX-License-Identifier: Apache-2.0
"""Check what a run reads before Ray starts: data, models, the tokenizer, accounts of trackers, its engine.

The trainer's process would find the same faults after a minute, each with a long traceback. It may run on
another machine, for a plan and on a Ray cluster: then, what is only missing here (`InputFault.absent`) is a
note.
"""

from __future__ import annotations

import json
import netrc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from ...config.checks.divisibility import OTHERS, SHARDED
from ...config.checks.refusals import UNREADABLE
from ...config.checks.teachers import LOSS, MODELS, TOPK, servers_of, teachers_of
from ...config.derived.adapters import ALL_LINEAR, adapter_rank, count_adapter_parameters
from ...config.paths import OWN, hint, select
from ...errors import ConfigError
from ..rollout.teacher_server import why_not
from ..rules.megatron_rules import makes_adapters
from ..rules.model_rules import HUB_NAME, cached_config
from .chat_check import why_no_chat
from .data_files import InputFault, each, faults_of_data
from .user_files import faults_of_user_files

MODEL, LOGGER = "actor_rollout_ref.model", "trainer.logger"
TRACE = "actor_rollout_ref.rollout.trace.backend"
TRAINED = ("actor_rollout_ref.actor", "critic")
LIGER = "liger_kernel"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""The files that transformers and the engines read weights from."""
FOLDERS = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    f"{OWN}.run_dir",
)


def require_inputs(
    config: Mapping[str, Any], *, critic: bool, images: bool, scored: bool, elsewhere: list[str] | None
) -> None:
    """Raises ConfigError with all inputs that a run could not read.

    `elsewhere` gets what is only absent here, where the run may be on another machine; see `faults`.
    """
    problems = list[str]()
    try:
        for fault in each(
            faults_of_user_files(config, images=images),
            faults(config, critic=critic, images=images, scored=scored),
        ):
            if fault.absent and elsewhere is not None:
                elsewhere.append(fault.absent)
            elif fault.problem:
                problems.append(fault.problem)
    except UNREADABLE:
        if not problems:
            raise
    if problems:
        raise ConfigError(*problems)


def faults(
    config: Mapping[str, Any], *, critic: bool, images: bool, scored: bool = False
) -> Iterator[InputFault]:
    """Yield what a run with this resolved config of verl could not read.

    `critic`: it has one. `images`: its policy draws pictures, so that it has no chat. `scored`: its episodes
    come with rewards.
    """
    # `diffusers_rules` reads a pipeline of diffusers.
    models = [] if images else [f"{MODEL}.path"]
    models += ["critic.model.path"] if critic and not images else []
    models += ["reward.reward_model.model_path"] if select(config, "reward.reward_model.enable") else []
    models += [f"{MODELS}.{name}.model_path" for name in teachers_of(config).keys() - servers_of(config)]
    elsewhere = any(select(config, f"{one}.megatron.use_dist_checkpointing") for one in TRAINED)
    yield from each(
        faults_of_data(config, scored=scored or images),
        *(_faults_of_model(key, select(config, key), weights=not elsewhere) for key in models),
        () if images else _faults_of_tokenizer(config),
        _faults_of_vocabularies(config),
        _faults_of_servers(config),
        () if images else _faults_of_targets(config),
        _faults_of_trackers(config),
        _faults_of_checkpoint(config),
        _faults_of_folders(config),
        _faults_of_engine(config, critic=critic),
    )


# The training engine.


def _faults_of_engine(config: Mapping[str, Any], *, critic: bool) -> Iterator[InputFault]:
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
    for section, model in (
        ("actor_rollout_ref.actor", MODEL),
        *([("critic", "critic.model")] if critic else ()),
    ):
        if select(config, f"{section}.strategy") not in SHARDED:
            continue
        yield from _faults_of_optimizer(config, f"{section}.optim")
        if select(config, f"{model}.use_liger") and find_spec(LIGER) is None:
            yield InputFault(
                f"{model}.use_liger must be False without the package {LIGER}, got True; install it, or "
                "leave the key out",
                f"the package {LIGER} of {model}.use_liger, which is not installed here",
            )


def _faults_of_optimizer(config: Mapping[str, Any], section: str) -> Iterator[InputFault]:
    """Check the class that verl's FSDP imports; of torch, it is looked up in the source."""
    module, name = (str(select(config, f"{section}.{key}")) for key in ("optimizer_impl", "optimizer"))
    if select(config, f"{section}.optimizer_impl") is None:
        return  # the section of another engine
    package, *inner = accumulate(module.split("."), "{}.{}".format)
    spec = is_here = find_spec(package)
    for inside in inner:  # of these, find_spec would import the packages around
        spec = PathFinder.find_spec(inside, (spec and spec.submodule_search_locations) or [])
    if spec is None:
        yield InputFault(
            f"{section}.optimizer_impl must be an installed module, got {module!r}; install it, or use "
            "torch.optim",
            ""
            if is_here
            else f"the package of {section}.optimizer_impl={module}, which is not installed here",
        )
    elif module == "torch.optim" and spec.origin:
        source = Path(spec.origin).read_text("utf-8")
        known = re.findall(r'^    "([A-Z]\w+)",$', source, re.MULTILINE)
        if known and name not in known:
            yield InputFault(
                f"{section}.optimizer must be a class of torch.optim ({', '.join(known)}), got {name!r}"
                f"{hint(name, known)}; correct it, or set optimizer_impl to its module"
            )


# Models.


def _faults_of_model(key: str, value: Any, *, weights: bool = True) -> Iterator[InputFault]:
    """Check that a model is a folder with a configuration and all its files, or may be one of the Hub.

    `weights`: it must have them.
    """
    if value is None:
        yield InputFault(f"{key} must be a model's folder or its name on the Hub, got None; set it")
        return
    name = str(value)
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
        elif cut := next(filter(None, map(_why_cut, sorted(folder.glob("*.safetensors")))), None):
            yield InputFault(f"{key} must have whole files, got {cut}; copy or download it again")
        elif weights and not any(file.suffix in WEIGHTS for file in folder.iterdir()):
            yield InputFault(
                f"{key} must have weights ({', '.join(WEIGHTS)}), got {name!r}, which has none; copy or "
                "download it again",
                f"the weights of {key}={name}, which are not on this machine",
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


def _faults_of_targets(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check that a layer of the model has one of the names that peft gets; a pattern is left to peft."""
    key = f"{MODEL}.target_modules"
    targets, folder = select(config, key), Path(str(select(config, f"{MODEL}.path"))).expanduser()
    named = adapter_rank(config) and isinstance(targets, list)
    if not named or select(config, "actor_rollout_ref.actor.strategy") not in SHARDED:
        return
    found, known = (count_adapter_parameters(folder, 1, names) for names in (targets, ALL_LINEAR))
    if known and not found:
        yield InputFault(
            f"{key} must name layers of the model, got {targets!r}, which it lacks; correct them, or set "
            f"{ALL_LINEAR}"
        )


def _why_cut(file: Path) -> str | None:
    """Return what is wrong with a file of weights whose header does not fit its size."""
    try:
        with safe_open(file, "np"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{str(file)!r} ({error})"


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
    if not folder.is_dir() and key.endswith("tokenizer_path"):
        yield from _faults_of_model(key, select(config, key), weights=False)
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


def _faults_of_vocabularies(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check that teachers know the same tokens as the policy; skip tokenizers of other kinds of files."""
    path = select(config, f"{MODEL}.tokenizer_path") or select(config, f"{MODEL}.path")
    for name, teacher in teachers_of(config).items():
        own, other = _vocabulary(path), _vocabulary(teacher.get("model_path"))
        if own and other and (odd := own.items() ^ other.items()):
            yield InputFault(
                f"{MODELS}.{name}.model_path must have the tokens of the policy, got "
                f"{teacher['model_path']!r}, where {len({token for token, _ in odd})} of {len(other)} "
                f"differ, e.g. {min(odd)[0]!r}; choose a teacher of the same family"
            )


def _faults_of_servers(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Ask the servers of teachers about some tokens."""
    likely = int(select(config, f"{LOSS}.topk")) if select(config, f"{LOSS}.loss_mode") == TOPK else 0
    path = select(config, f"{MODEL}.tokenizer_path") or select(config, f"{MODEL}.path")
    for name, url in servers_of(config).items():
        file = _tokenizer_file(path)
        if why := why_not(url, likely, Tokenizer.from_file(str(file)) if file.is_file() else None):
            key = f"{MODELS}.{name}.model_path"
            yield InputFault(
                f"{key} must be a server that returns log-probs of prompts, got {url}: {why}; correct it, or "
                f"start vllm serve MODEL --max-logprobs {max(1, likely)}",
                f"{key}={url}, where no such server answers from here",
            )


def _tokenizer_file(path: Any) -> Path:
    return Path(str(path)).expanduser() / "tokenizer.json"


def _vocabulary(path: Any) -> Mapping[str, int]:
    """Return the tokens of a model's folder and their numbers; none if the folder has no fast tokenizer."""
    file = _tokenizer_file(path)
    return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else {}


# Folders.


def _faults_of_checkpoint(config: Mapping[str, Any]) -> Iterator[InputFault]:
    path = select(config, "trainer.resume_from_path")
    resumes = select(config, "trainer.resume_mode") == "resume_path" and path is not None
    if resumes and not Path(str(path)).expanduser().is_dir():
        yield InputFault(
            f"trainer.resume_from_path must be an existing folder global_step_N, got {path!r}; correct it",
            f"trainer.resume_from_path={path}, which is not on this machine",
        )


def _faults_of_folders(config: Mapping[str, Any]) -> Iterator[InputFault]:
    """Check that the folders to which a run writes can be made."""
    for key, name in ((key, str(name)) for key in FOLDERS if (name := select(config, key))):
        folder = Path(name).absolute()
        there = next(one for one in (folder, *folder.parents) if os.path.exists(one))
        if "://" not in name and not (there.is_dir() and os.access(there, os.W_OK)):
            yield InputFault(
                f"{key} must be a folder that can be made, got {name!r}, but {there} is no writable folder; "
                "correct it",
                f"{key}={name}, which cannot be made on this machine",
            )


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
TRACERS: Mapping[str, _Tracker] = {
    "weave": _Tracker("weave", _wandb_knows, "set WANDB_API_KEY, or run `wandb login`"),
    "mlflow": _Tracker("mlflow"),
    "trackio": _Tracker("trackio"),
}
"""The backends of verl's traces of rollouts."""


def _faults_of_trackers(config: Mapping[str, Any]) -> Iterator[InputFault]:
    for key, known in ((LOGGER, TRACKERS), (TRACE, TRACERS)):
        value = select(config, key)
        names: Iterable[Any] = [value] if isinstance(value, str) else value or ()
        for name in names:
            if name in known:
                yield from _faults_of_tracker(key, name, known[name])
            else:
                near = hint(str(name), known)
                yield InputFault(f"{key} must be of {', '.join(known)}, got {name!r}{near}; correct it")


def _faults_of_tracker(key: str, name: str, tracker: _Tracker | None) -> Iterator[InputFault]:
    if tracker is None:
        return
    if find_spec(tracker.module) is None:
        yield InputFault(
            f"{key} must have installed trackers, got {name!r} without the package {tracker.module}; "
            "install it, or leave the tracker out",
            f"{key}={name}, whose package {tracker.module} is not on this machine",
        )
    elif not tracker.has_account():
        yield InputFault(
            f"{key} must have trackers with credentials, got {name!r} without; {tracker.remedy}",
            f"{key}={name}, whose credentials are not on this machine",
        )

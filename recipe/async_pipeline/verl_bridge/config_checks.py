# SPDX-License-Identifier: Apache-2.0
"""Check a verl config before Ray starts, by one list of checks: `CHECKS`. Error messages have one line."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config

from ..checkpoint.resume import check_keys
from ..config.agent_program import program_values
from ..config.aliases import BYPASS, FLOW_GRPO, FOREIGN
from ..config.batch_sizes import check_batch_sizes
from ..config.environment_arguments import check_environment
from ..config.loss_modes import LOSS_CONFIG, OWN_LOSSES
from ..config.paths import MODE, OWN, PATCH_FREE, hint, select
from ..config.placement import PLACED, POOLS, RATIOS, TASK_RATIOS, Placement, placement_of, proximal_policy
from ..config.refusals import Settings, refuse
from ..config.rollout_correction import CORRECTION, LEFT_OUT, POLICY_LOSS, check_estimator, check_loss
from ..config.schema import AsyncPipelineConfig
from ..config.translation import Translation, is_enabled, require_no_stray_keys, resolve
from ..config.user_classes import find_class, schedule_at
from ..config.verl_options import REWARDS
from ..core.graph import GRAPH, OPTIONAL, graph_of
from ..errors import ConfigError
from ..patching.patched_tree import require_known, require_patched
from ..patching.verl_source import find_verl_root
from ..stages.custom import insert_custom_stages
from .config_rules import check_devices, check_sections, check_verl_config, has_critic
from .diffusers_rules import check_images
from .model_rules import ROLLOUT
from .plugin_state import require_loaded
from .reward.executor import FILE, PACKAGE, FunctionLocation
from .spelling import check_spelling
from .workers.loss_registry import OffPolicyLossConfig

FOREIGN_PATHS = tuple(key.path for key in FOREIGN)
STOCK_LOSS_CONFIG = "verl.workers.config.PolicyLossConfig"


class Checked(NamedTuple):
    """A config that the pipeline can run."""

    translation: Translation
    placement: Placement
    old_logp: str
    """The policy of old log-probs; see `placement.proximal_policy`."""


@dataclass
class Review:
    """A config under check, and what the checks have found. Each check may use results of earlier ones."""

    raw: dict[str, Any]
    """The user's config. `_resolve` resolves the interpolations of this package's knobs, no others."""
    config: DictConfig
    """A copy in which verl's own keys get the values that follow from our keys."""
    translation: Translation = field(init=False)
    resolved: Mapping[str, Any] = field(init=False)
    placement: Placement = field(init=False)
    old_logp: str = field(init=False)

    @property
    def knobs(self) -> AsyncPipelineConfig:
        return self.translation.config

    @property
    def bypass(self) -> bool:
        """Whether verl takes old log-probs from the rollout."""
        return bool(OmegaConf.select(self.config, BYPASS))


def checked(config: DictConfig) -> Checked | None:
    """Run `CHECKS` on a config. Returns what they found, or None if the config does not ask for the pipeline.

    Raises ConfigError or PatchedVerlRequired if the pipeline could not run; leaves the config as it is.
    """
    raw = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    if not is_enabled(raw):
        require_no_stray_keys(raw)
        return None
    review = Review(raw, copy.deepcopy(config))
    for check in CHECKS:
        check(review)
    return Checked(review.translation, review.placement, review.old_logp)


def _require_patches(review: Review) -> None:
    """Raises PatchedVerlRequired if verl lacks our patches and the run does not start without them."""
    if select(review.raw, MODE) == PATCH_FREE:
        require_known(find_verl_root())
    else:
        require_patched(find_verl_root())


def _translate(review: Review) -> None:
    """Raises ConfigError if one of our keys is unknown, misplaced, contradictory or has a wrong value."""
    review.translation = resolve(review.raw)


def _apply_translation(review: Review) -> None:
    """Set verl's own keys to the values that follow from our keys; drop the keys of other systems."""
    _update(review.config, review.translation.verl)
    with open_dict(review.config):
        remove_keys(review.config, FOREIGN_PATHS)


def _check_resume(review: Review) -> None:
    """Raises ConfigError if verl's keys for checkpoints contradict each other."""
    review.resolved = cast("dict[str, Any]", OmegaConf.to_container(review.config, resolve=True))
    check_keys(review.resolved)


def _place(review: Review) -> None:
    """Raises ConfigError if the stages do not fit the devices."""
    layout = next((path for path in (RATIOS, TASK_RATIOS) if select(review.raw, path) is not None), POOLS)
    roles = _placed_roles(review.config, bypass=review.bypass)
    review.placement = placement_of(review.resolved, review.knobs.pools, roles, layout)


def _choose_old_logp(review: Review) -> None:
    """Raises ConfigError if the placement does not permit the chosen policy of old log-probs."""
    review.old_logp = proximal_policy(review.knobs, review.placement, bypass=review.bypass)


def _require_corrections_that_work(config: DictConfig) -> None:
    """Raises ConfigError if verl would silently leave out the chosen rollout correction."""
    refuse(LEFT_OUT, Settings(config))
    check_estimator(config, {*ADV_ESTIMATOR_REGISTRY, FLOW_GRPO})
    # Losses that an external library registers in the workers are unknown here.
    check_loss(
        config,
        None
        if OmegaConf.select(config, "actor_rollout_ref.model.external_lib")
        else {*POLICY_LOSS_REGISTRY, *OWN_LOSSES},
    )

    losses = config.actor_rollout_ref.actor.policy_loss
    if losses.get("_target_") in (STOCK_LOSS_CONFIG, LOSS_CONFIG):
        known = [field.name for field in dataclasses.fields(OffPolicyLossConfig)]
        for name in losses:
            if name not in known and name != "_target_":
                raise ConfigError(
                    f"{POLICY_LOSS}.{name} is unknown, got {losses[name]!r}{hint(str(name), known)}; keys: "
                    f"{', '.join(known)}"
                )

    _try_correction(OmegaConf.select(config, CORRECTION) or {})


def _try_correction(section: Mapping[str, Any]) -> None:
    """Try the correction on one token with verl's own functions.

    Raises ConfigError if they refuse it, or if the token gets no weight.
    """
    token, mask = torch.zeros(1, 1), torch.ones(1, 1)
    for name, compute, example in (
        (
            "rollout_is",
            compute_rollout_correction_weights,
            "2.0, or for a band that contains 1 '\"0.5_5.0\"'",
        ),
        ("rollout_rs", compute_rollout_rejection_mask, "'\"0.5_2.0\"' for k1, 0.1 for k2 and k3"),
    ):
        if section.get(name) is None:
            continue

        threshold = section.get(f"{name}_threshold")
        try:
            weights = compute(token, mask, section[name], threshold)[0]
            good = bool(weights.isfinite().all())
            why = "no finite weight"
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            good, why = False, " ".join(str(error).split()).rstrip(".")
        if not good:
            raise ConfigError(
                f"{CORRECTION}.{name}={section[name]} with {name}_threshold, got {threshold!r}, fails on a "
                f"token of ratio 1: {why}; e.g. {example}"
            )


def _update(config: DictConfig, values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        OmegaConf.update(config, path, value, force_add=True)


def remove_keys(config: DictConfig, paths: Iterable[str]) -> None:
    """Remove keys, and sections that are empty afterwards: verl's dataclasses would not accept them."""
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        if isinstance(node, DictConfig) and leaf in node:
            del node[leaf]
            if parent and not node:
                remove_keys(config, (parent,))


def _placed_roles(config: DictConfig, *, bypass: bool) -> list[str]:
    absent = (
        (set() if has_critic(config) else {"critic"})
        | ({"logp"} if bypass else set())
        | (set() if need_reference_policy(config) else {"ref_logp"})
    )
    return [role for role in PLACED if role not in absent]


def _resolve(review: Review) -> None:
    """Resolve the knobs. Raises ConfigError if any interpolation of the config has no value."""
    _resolved(review.config)
    own = OmegaConf.select(review.config, OWN)
    if isinstance(own, DictConfig):
        review.raw["trainer"]["v1"]["async_pipeline"] = _resolved(own)


def _resolved(config: DictConfig) -> dict[str, Any]:
    """Return a section as plain values.

    Raises ConfigError if an interpolation such as ${oc.env:NAME} has no value.
    """
    try:
        return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise ConfigError(
            f"{error.full_key} cannot be resolved: {text}; set it or override the key"
        ) from None


def _require_importable(knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError if the strategy is none, or a custom stage names a class that cannot be found."""
    schedule_at(knobs.strategy, f"{OWN}.strategy")
    for spec in knobs.custom_stages:
        target = spec.partition("@")[0]
        if ":" in target:
            find_class(target, f"{OWN}.custom_stages")


def _require_reward_function(config: DictConfig, knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError if the reward function is missing, or does not fit the knobs."""
    refuse(REWARDS, Settings(config, knobs))
    path = OmegaConf.select(config, "reward.custom_reward_function.path")
    if knobs.reward.timeout_s is None:
        # The workers load it, each within its own limits; here it only has to exist.
        if path and not str(path).startswith(PACKAGE) and not Path(str(path).removeprefix(FILE)).is_file():
            raise ConfigError(
                f"reward.custom_reward_function.path must be an existing Python file or {PACKAGE}MODULE, got "
                f"{str(path)!r}; correct it"
            )
        return

    FunctionLocation(str(path), str(config.reward.custom_reward_function.name), {}).load()


def _require_stages_that_fit(config: DictConfig, knobs: AsyncPipelineConfig) -> None:
    """Raises ConfigError if a custom stage is not registered or its edge does not exist."""
    critic, reference = has_critic(config), need_reference_policy(config)
    roles = [role for role in GRAPH if role not in OPTIONAL or (reference if role == "ref_logp" else critic)]
    try:
        insert_custom_stages(graph_of(roles), knobs.custom_stages)
    except ConfigError as error:
        raise ConfigError(f"{OWN}.custom_stages: {error}") from None


def _require_verls_consent(review: Review) -> None:
    """Raises ConfigError with verl's reason if verl would refuse the config after these checks.

    Without the critic, for which verl loads a model's config.
    """
    config = copy.deepcopy(review.config)
    set_pool_sizes(config, review.placement)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate_config(config, need_reference_policy(config), use_critic=False)
    except (AssertionError, ValueError, TypeError, InstantiationException) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"verl refuses this config: {reason}; correct it") from None


def set_pool_sizes(config: DictConfig, placement: Placement) -> None:
    """Set verl's numbers of training and rollout devices from the pools."""
    for role, path in (("train", "trainer"), ("generate", ROLLOUT)):
        pool = placement.pool_of(role)
        assert pool is not None
        _update(config, {f"{path}.nnodes": len(pool.per_node), f"{path}.n_gpus_per_node": pool.per_node[0]})


CHECKS: tuple[Callable[[Review], object], ...] = (
    lambda review: require_loaded(),
    _require_patches,
    _resolve,
    lambda review: check_sections(review.config),
    _translate,
    lambda review: _require_importable(review.knobs),
    lambda review: _require_reward_function(review.config, review.knobs),
    lambda review: check_environment(review.knobs.agentic),
    lambda review: program_values(review.knobs.agentic),
    _apply_translation,
    lambda review: check_spelling(review.config),
    lambda review: check_verl_config(review.config),
    lambda review: check_images(review.config, review.knobs, critic=has_critic(review.config)),
    lambda review: _require_stages_that_fit(review.config, review.knobs),
    lambda review: _require_corrections_that_work(review.config),
    _check_resume,
    _place,
    _choose_old_logp,
    lambda review: check_devices(review.config, review.placement, review.knobs),
    lambda review: check_batch_sizes(review.resolved, review.placement),
    _require_verls_consent,
)
"""All checks, in the order in which they run; a wrong config gets the message of the first that fails."""

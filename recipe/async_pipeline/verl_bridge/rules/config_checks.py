# SPDX-License-Identifier: Apache-2.0
"""Check a verl config before Ray starts, by one list of checks: `CHECKS`. Each problem has one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ...checkpoint.resume import check_keys
from ...config.checks.agent_program import program_values
from ...config.checks.batch_sizes import check_sizes_alone, fit_batch_sizes
from ...config.checks.environment_arguments import check_environment
from ...config.checks.refusals import UNREADABLE, Settings, refuse
from ...config.checks.verl_options import REWARDS
from ...config.derived.adapters import ASSUMED_RANK, MODEL, adapter_rank, publishes_adapters, rank_in
from ...config.derived.sample_store import fit_capacity
from ...config.derived.scheduling import proximal_policy, read_before_update
from ...config.keys.aliases import BYPASS, FOREIGN
from ...config.keys.misplaced import FILES_OF, SWITCHES
from ...config.keys.older_verl import corrected
from ...config.keys.translation import Translation, is_enabled, require_no_stray_keys, resolve
from ...config.keys.without_effect import profiling_off, unmet
from ...config.knobs.schema import AsyncPipelineConfig
from ...config.paths import MODE, OWN, PATCH_FREE, select
from ...config.placement import POOLS, RATIOS, TASK_RATIOS, TASKS, Placement, placement_of
from ...errors import ConfigError
from ...installed.verl import find_verl_root, require_known, require_patched
from .. import replaced
from ..launch import light_verl
from ..launch.data_files import rows_of
from ..launch.inputs import require_inputs
from ..launch.run_config import (
    address_to_join,
    copy_of,
    notes_on_machine,
    remove_keys,
    resolved_of,
    run_dir_of,
    set_pool_sizes,
    update,
)
from ..workers.attention import set_attention
from .config_rules import (
    CORRECTION_CHECKS,
    OPTION_CHECKS,
    check_devices,
    check_sections,
    check_types,
    require_importable,
    require_stages_that_fit,
)
from .diffusers_rules import check_images, draws_images, set_image_keys
from .engine_arguments import largest_adapter_rank
from .engine_memory import set_engine_memory
from .expert_backends import set_expert_kernels
from .model_rules import described_model, has_critic, has_reference, placed_roles
from .spelling import check_spelling
from .verl_keys import keys_without_effect

FOREIGN_PATHS = tuple(key.path for key in FOREIGN)
LAYOUTS = (POOLS, RATIOS, TASKS, TASK_RATIOS)
"""Keys without which checks of the placement would refuse what is right."""
DECISIVE = (f"{OWN}.agentic", *FILES_OF)
"""Keys without which any later check would."""


class Checked(NamedTuple):
    """A config that the pipeline can run."""

    translation: Translation
    placement: Placement
    old_logp: str
    """The policy of old log-probs; see `scheduling.proximal_policy`."""
    unchecked: tuple[str, ...] = ()
    """What is not on this machine, one line each; the run may be elsewhere, and would refuse it there."""


@dataclass
class Review:
    """A config under check, and what the checks have found. Each check may use results of earlier ones."""

    raw: dict[str, Any]
    """The user's config. `_resolve` resolves the interpolations of this package's knobs, no others."""
    config: DictConfig
    """A copy in which verl's own keys get the values that follow from our keys."""
    absent: list[str] | None = None
    """See `checked`."""
    unchecked: list[str] = field(default_factory=list)
    on_machine: tuple[str, ...] = ()
    """What the run may do without on this machine, one warning each."""
    placed: bool = True
    """Whether the keys that place the stages are right."""
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

    @property
    def planning(self) -> bool:
        """Whether files may be missing, because the run is elsewhere."""
        return self.absent is not None


def checked(
    config: DictConfig, given: tuple[str, ...] = (), *, absent: list[str] | None = None
) -> Checked | None:
    """Run `CHECKS` on a config. Returns what they found, or None if the config does not ask for the pipeline.

    `given`: problems of the command line, which are listed first. `absent`: of a run elsewhere, to which what
    is missing only here is added, one line each.

    Raises ConfigError with all problems, or PatchedVerlRequired, if the pipeline could not run; leaves the
    config as it is.
    """
    replaced.apply("configuration")
    raw = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    if not is_enabled(raw):
        try:
            require_no_stray_keys(raw)
        except ConfigError as error:
            raise ConfigError(*given, *error.problems) from None
        return None
    review = Review(raw, copy_of(config), absent, [] if absent is None else absent)
    if problems := (*given, *_problems(review, given)):
        refused = ConfigError(*problems)
        refused.warnings = review.on_machine
        raise refused
    return Checked(review.translation, review.placement, review.old_logp, tuple(review.unchecked))


def _require_patches(review: Review) -> None:
    """Raises PatchedVerlRequired if verl lacks our patches and the run does not start without them."""
    require = require_known if select(review.raw, MODE) == PATCH_FREE else require_patched
    require(find_verl_root())


def _translate(review: Review) -> None:
    """Raises ConfigError if keys of this package are unknown, misplaced, contradictory or wrong.

    The later checks continue without these, unless one is decisive.
    """
    problems, found = list[str](), None
    while found is None:
        try:
            found = resolve(review.raw)
        except ConfigError as error:
            wrong = [_key_of(problem) for problem in error.problems]
            stuck = not set(problems).isdisjoint(error.problems)
            problems += [] if stuck else error.problems
            if stuck or any(path.startswith(DECISIVE) or select(review.raw, path) is None for path in wrong):
                raise ConfigError(*problems) from None
            if any(path.startswith(LAYOUTS) for path in wrong):
                review.placed, wrong = False, [*wrong, *LAYOUTS]
            with open_dict(review.config):
                remove_keys(review.config, wrong)
            review.raw = cast("dict[str, Any]", OmegaConf.to_container(review.config, resolve=False))
            _resolve(review)
    notes = (*found.notes, *keys_without_effect(review.raw))
    review.translation = replace(found, verl={**found.verl, **profiling_off(review.raw)}, notes=notes)
    if problems:
        raise ConfigError(*problems)


def _apply_translation(review: Review) -> None:
    """Set the keys of verl that follow from this package's; drop the switch and keys of other systems."""
    update(review.config, review.translation.verl)
    with open_dict(review.config):
        # verl's `validate_config` refuses the switch: see entry_points.without_switch.
        remove_keys(review.config, (*SWITCHES, *FOREIGN_PATHS))


def _note_device(review: Review) -> None:
    if (device := OmegaConf.select(review.config, "trainer.device")) not in (None, "cuda", "cpu"):
        review.unchecked.append(f"trainer.device={device}, on which this package was never run")


def _check_resume(review: Review) -> None:
    """Raises ConfigError if verl's keys for checkpoints contradict each other."""
    review.resolved = cast("dict[str, Any]", OmegaConf.to_container(review.config, resolve=True))
    check_keys(review.resolved)


def _place(review: Review) -> None:
    """Raises ConfigError if the stages do not fit the devices."""
    if not review.placed:
        return
    layout = next((path for path in (RATIOS, TASK_RATIOS) if select(review.raw, path) is not None), POOLS)
    roles = placed_roles(review.config, bypass=review.bypass)
    review.placement = placement_of(review.resolved, review.knobs.pools, roles, layout)


def _choose_old_logp(review: Review) -> None:
    """Raises ConfigError if the placement does not permit the chosen policy of old log-probs."""
    reader = read_before_update(review.resolved)
    review.old_logp = proximal_policy(review.knobs, review.placement, bypass=review.bypass, reader=reader)
    if review.old_logp == "update":
        review.placement = review.placement.without("logp")


def _resolve(review: Review) -> None:
    """Resolve the knobs. Raises ConfigError if any interpolation of the config has no value."""
    resolved_of(review.config)
    own = OmegaConf.select(review.config, OWN)
    if isinstance(own, DictConfig):
        review.raw["trainer"]["v1"]["async_pipeline"] = resolved_of(own)


def _require_inputs(review: Review) -> None:
    """Raises ConfigError if an input cannot be read; notes what a plan or a cluster may have elsewhere."""
    elsewhere = review.planning or address_to_join(review.config) is not None
    require_inputs(
        review.resolved,
        critic=has_critic(review.config),
        images=draws_images(review.config),
        scored=bool(review.knobs.agentic.environment or review.knobs.agentic.agent),
        elsewhere=review.unchecked if elsewhere else None,
    )


def _require_machine(review: Review) -> None:
    """Raises ConfigError if Ray and the run could not start here; notes what the run may do without."""
    if address_to_join(review.config) is None:  # a cluster that runs already has started
        review.on_machine = notes_on_machine(review.resolved, review.knobs, planning=review.planning)
        _note(review, review.on_machine)


def _note(review: Review, notes: Iterable[str]) -> None:
    review.translation = replace(review.translation, notes=(*review.translation.notes, *notes))


def _adopt_adapter(review: Review) -> None:
    """Take the rank of an adapter that is trained further from its files, if no key has it."""
    path = OmegaConf.select(review.config, f"{MODEL}.lora_adapter_path")
    if path is None or adapter_rank(cast("dict[str, Any]", review.config)):
        return
    rank = rank_in(Path(str(path)))
    if rank is not None:
        _set(review, {f"{MODEL}.lora_rank": (rank, f"the rank of {path}")})
    elif review.planning and not Path(str(path)).exists():
        review.unchecked.append(f"{MODEL}.lora_adapter_path={path}, which is not on this machine")
        _set(review, {f"{MODEL}.lora_rank": (ASSUMED_RANK, "assumed for this plan")})
    now = cast("dict[str, Any]", OmegaConf.to_container(review.config, resolve=False))
    _set(review, {path: found for path, found in corrected(now).items() if select(now, path) != found[0]})


def _fit_batch_sizes(review: Review) -> None:
    """Make micro-batches fit their batches. Raises ConfigError if other sizes do not divide."""
    _set(review, fit_batch_sizes(review.resolved, review.placement))
    count_prompts = partial(rows_of, review.resolved, "val")
    _set(review, fit_capacity(review.resolved, review.knobs, count_prompts))


def _set(review: Review, found: Mapping[str, tuple[Any, str]]) -> None:
    """Set keys of verl, each to a value and with a note why, in the config and in what a run sets."""
    values = {path: value for path, (value, _) in found.items()}
    update(review.config, values)
    _note(review, (f"{path} is set to {value}: {why}" for path, (value, why) in found.items()))
    review.translation = replace(review.translation, verl={**review.translation.verl, **values})


def _require_servable_rank(review: Review) -> None:
    """Raises ConfigError if adapters have a rank that vLLM does not serve, for which verl imports vLLM."""
    rank, engine = adapter_rank(review.resolved), review.config.actor_rollout_ref.rollout.name
    if engine != "vllm" or not publishes_adapters(review.resolved):
        return
    if (largest := largest_adapter_rank()) is None:
        review.unchecked.append("the largest rank of an adapter, for which verl asks vllm")
    elif rank > largest:
        raise ConfigError(
            f"{MODEL}.lora_rank must be at most {largest}, the largest that the installed vllm serves, got "
            f"{rank}; lower it"
        )


def _require_verls_consent(review: Review) -> None:
    """Raises ConfigError with verl's reason if verl would refuse the config after these checks.

    Without the critic, for which verl loads a model's config, and without the rank of adapters. Changes the
    review's config: no check comes after this one.
    """
    config = review.config
    set_pool_sizes(config, review.placement)
    update(config, {f"{MODEL}.lora.merge": True})
    if reason := light_verl.refusal(config, reference=has_reference(config)):
        raise ConfigError(f"verl refuses this config: {reason}; correct it")


def set_verls_keys(config: DictConfig, found: Checked, overrides: Sequence[str]) -> tuple[str, ...]:
    """Set verl's own keys to the values that follow from the knobs and from keys of other systems.

    `overrides` is the command line, as far as it is known. Returns a line for each key that gets another
    default than verl's, and on keys of the command line that have no effect with the others.
    """
    update(config, found.translation.verl)
    set_pool_sizes(config, found.placement)
    # A library of the user may have estimators and losses that read any key.
    words = () if OmegaConf.select(config, f"{MODEL}.external_lib") else overrides
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    idle = tuple(unmet(keys, partial(OmegaConf.select, config)))
    if draws_images(config):
        set_image_keys(config, found.translation.config)
        return idle
    described = described_model(config)
    notes = (
        *set_attention(config),
        set_expert_kernels(config, described),
        set_engine_memory(config, found.translation.config, overrides),
    )
    return (*idle, *(note for note in notes if note is not None))


class Check(NamedTuple):
    """One check, and when it makes sense."""

    run: Callable[[Review], object]
    stops: bool = False
    """Whether no later check means anything if this one fails without what it `finds`."""
    finds: str = ""
    needs: str = ""
    """What of the review an earlier check must have found."""
    last: bool = False
    """Whether it runs only if nothing was wrong before, since it would say the same in other words."""


CHECKS: tuple[Check, ...] = (
    Check(lambda review: light_verl.require_plugin(), stops=True),
    Check(_require_patches, stops=True),
    Check(_resolve, stops=True),
    Check(lambda review: check_sections(review.config), stops=True),
    Check(_translate, stops=True, finds="translation"),
    Check(lambda review: require_importable(review.knobs)),
    Check(lambda review: refuse(REWARDS, Settings(review.config, review.knobs))),
    Check(lambda review: check_environment(review.knobs.agentic)),
    Check(lambda review: program_values(review.knobs.agentic)),
    Check(_apply_translation, stops=True),
    Check(_note_device),
    Check(_adopt_adapter),
    Check(lambda review: check_spelling(review.config)),
    *(Check(lambda review, run=run: run(review.config)) for run in OPTION_CHECKS),  # type: ignore[misc]
    Check(lambda review: check_images(review.config, review.knobs, critic=has_critic(review.config))),
    Check(lambda review: require_stages_that_fit(review.config, review.knobs)),
    *(
        Check(lambda review, run=run: run(review.config, review.knobs))  # type: ignore[misc]
        for run in CORRECTION_CHECKS
    ),
    Check(_check_resume),
    Check(lambda review: check_types(review.resolved), needs="resolved"),
    Check(_require_inputs, needs="resolved"),
    Check(lambda review: run_dir_of(review.config, review.knobs)),
    Check(_place, needs="resolved"),
    Check(_choose_old_logp, needs="placement"),
    Check(lambda review: check_devices(review.config, review.placement, review.knobs), needs="placement"),
    Check(_fit_batch_sizes, needs="placement"),
    Check(lambda review: check_sizes_alone(review.resolved), needs="resolved"),
    Check(_require_machine, needs="resolved"),
    Check(_require_servable_rank, last=True),
    Check(_require_verls_consent, last=True),
)
"""All checks, the most fundamental first; a wrong config gets the messages of all that fail."""


def _key_of(problem: str) -> str:
    """Return the key with which a problem begins, as `KEY must be …` or `KEY=VALUE requires …`."""
    return problem.partition(" ")[0].partition("=")[0]


def _problems(review: Review, given: Iterable[str]) -> Iterator[str]:
    """Run the checks; yield one line for each problem but `given`; the first check of a key decides."""
    keys = before = {*map(_key_of, given)}
    for check in CHECKS:
        if (check.last and keys != before) or (check.needs and not hasattr(review, check.needs)):
            continue
        try:
            check.run(review)
        except ConfigError as error:
            new = [problem for problem in error.problems if _key_of(problem) not in keys]
            yield from dict.fromkeys(new)
            keys = keys.union(map(_key_of, new))
            if check.stops and not hasattr(review, check.finds):
                return
        except (*UNREADABLE, OmegaConfBaseException):
            if not keys:
                raise

# SPDX-License-Identifier: Apache-2.0
"""Keys of image policies of other systems: GeRL's, which are flat, and verl-omni's, which are nested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from .foreign_keys import Draft, ForeignKey
from .paths import select

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_LOSS, _LOSS_MODE = f"{_ACTOR}.diffusion_loss", f"{_ACTOR}.policy_loss.loss_mode"
_CLIPS = tuple(f"{_ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high"))
_DEVICES = "trainer.n_gpus_per_node"
FLOW_GRPO = "flow_grpo"
KNOBS: Mapping[str, str] = {
    **{
        f"{_ROLLOUT}{section}.{name}": f"diffusion.{name}"
        for section in ("", ".algo")
        for name in ("noise_level", "sde_type", "sde_window_size")
    },
    f"{_ROLLOUT}.num_inference_steps": "diffusion.num_inference_steps",
    f"{_ROLLOUT}.image_height": "diffusion.height",
    f"{_ROLLOUT}.image_width": "diffusion.width",
    **{
        f"{_ROLLOUT}.pipeline.{name}": f"diffusion.{name}"
        for name in ("num_inference_steps", "height", "width", "max_sequence_length")
    },
    f"{_ROLLOUT}.val_kwargs.pipeline.num_inference_steps": "diffusion.validation_steps",
}
"""The knob that has the value of each key."""


def _same(path: str, knob: str) -> ForeignKey:
    def apply(value: Any, draft: Draft) -> str:
        draft.propose(knob, value, path)
        return f"{knob}={value}"

    return ForeignKey(path, apply, sets=(knob,), meaning=f"`{knob}`")


def _window(path: str) -> ForeignKey:
    first, end = "diffusion.sde_window_first", "diffusion.sde_window_end"

    def apply(value: Any, draft: Draft) -> str:
        whole = isinstance(value, list | tuple) and len(value) == 2 and all(type(x) is int for x in value)
        if not whole:
            raise ConfigError(f"{path} must be [first, end], two whole numbers, got {value!r}; correct it")
        draft.propose(first, value[0], path)
        draft.propose(end, value[1], path)
        return f"{first}={value[0]}, {end}={value[1]}"

    return ForeignKey(path, apply, sets=(first, end), meaning=f"`{first}` and `{end}`")


def _only(path: str, wanted: Any, remedy: str, *, unique: bool = True) -> ForeignKey:
    def apply(value: Any, draft: Draft) -> str:
        if value != wanted or isinstance(value, bool):
            raise ConfigError(f"{path} must be {wanted!r} with this pipeline, got {value!r}; {remedy}")
        return "nothing: it is so"

    return ForeignKey(path, apply, meaning=f"nothing: must be `{wanted}`", unique=unique)


def _refused(path: str, remedy: str) -> ForeignKey:
    def apply(value: Any, draft: Draft) -> str:
        raise ConfigError(f"{path} must be left out with this pipeline, got {value!r}; {remedy}")

    return ForeignKey(path, apply, meaning=f"an error: {remedy}", unique=False)


def _verls(path: str, theirs: tuple[str, ...], check: Callable[[Any], bool], rule: str) -> ForeignKey:
    """Return a key whose value goes to keys of verl."""

    def apply(value: Any, draft: Draft) -> str:
        if isinstance(value, bool) or not check(value):
            raise ConfigError(f"{path} must be {rule}, got {value!r}; correct it")
        draft.verl |= dict.fromkeys(theirs, value)
        return f"{', '.join(theirs)}={value}"

    meaning = ", ".join(f"`{name}`" for name in theirs)
    return ForeignKey(path, apply, meaning=meaning, unique=False)


_NO_GUIDANCE = "guidance by a second forward is not supported, and FLUX's own guidance is set by its family"

IMAGE_KEYS: tuple[ForeignKey, ...] = (
    *(_same(path, knob) for path, knob in KNOBS.items()),
    *(_window(f"{_ROLLOUT}{section}.sde_window_range") for section in ("", ".algo")),
    *(
        _only(f"{_ROLLOUT}.{name}", 1.0, _NO_GUIDANCE)
        for name in ("guidance_scale", "pipeline.guidance_scale", "pipeline.true_cfg_scale")
    ),
    _only(f"{_ROLLOUT}.val_kwargs.algo.noise_level", 0.0, "images of a validation are drawn without noise"),
    _only(f"{_LOSS}.loss_mode", FLOW_GRPO, f"set {_LOSS_MODE} to one of verl's", unique=False),
    _verls(
        f"{_LOSS}.clip_ratio",
        _CLIPS,
        lambda value: isinstance(value, int | float) and 0 < value < 1,
        "a number between 0 and 1",
    ),
    _verls(
        f"{_ACTOR}.n_gpus_per_node",
        (_DEVICES,),
        lambda value: isinstance(value, int) and value >= 1,
        "a whole number >= 1",
    ),
    _refused("data.reward_fn", "set reward.custom_reward_function.path to a file with a function of images"),
    _refused("data.data_source", "write it into each row of the data, as the column data_source"),
)


def losses_of_images(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss of verl that `loss_mode=flow_grpo` means: its own, since a step is a token."""
    return {_LOSS_MODE: "vanilla"} if select(raw, _LOSS_MODE) == FLOW_GRPO else {}

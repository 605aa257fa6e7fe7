# SPDX-License-Identifier: Apache-2.0
"""What becomes of each key of verl's configuration in a pipeline run: `patches/keys.tsv`.

`python -m recipe.async_pipeline.tools.verl_keys.verdicts` writes the file. A key is read by verl, read by
this package, refused with any other value, or without effect, for a reason in
`config/keys/without_effect.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...config.checks.refusals import ALWAYS
from ...config.checks.verl_options import RULES
from ...config.keys.without_effect import is_below, why_without_effect
from ...config.paths import walk
from ...installed.verl import OF_ALL_ENGINES, keys_of_tree, patches_dir
from ..contract import trees
from ..contract.sources import Definition, Sources
from ..patches import series, verl_source
from .reads import SUFFIX, UNKNOWN, KeyRead, Unit, units_of_a_run

FILE = "keys.tsv"
WITHOUT_EFFECT = "without effect"
_TURBO = "verl/workers/engine/fsdp/fsdp_turbo_impl.py"
DECIDED: Mapping[str, str] = {
    "*.turbo_config": f"read by verl: {_TURBO}, which passes it on to FSDP-Turbo",
    "*.fsdp*.wrap_policy": "read by verl: verl/utils/fsdp_utils.py:get_fsdp_wrap_policy",
    "algorithm.kl_ctrl": "read by verl: verl/trainer/ppo/core_algos.py:get_kl_controller",
    "critic.strategy": "read by verl: verl/workers/config/critic.py, which copies it to the engine",
    "*.use_mbridge": "read by verl: verl/workers/engine/megatron/transformer_impl.py, which requires it",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": "read by verl: verl/workers/engine_workers.py, "
    "which requires the actor's",
    "*.fsdp*.dtype": "read by us: recipe/async_pipeline/config/keys/older_verl.py:corrected",
    "trainer.max_*_ckpt_to_keep": "read by us: recipe/async_pipeline/verl_bridge/trainer/checkpointing.py",
    "algorithm.rollout_correction.loss_type": "read by verl: "
    "verl/trainer/ppo/core_algos.py:compute_policy_loss_bypass_mode",
    "distillation.distillation_loss.clip_ratio*": "read by verl: "
    "verl/trainer/ppo/core_algos.py:compute_policy_loss_vanilla",
    "actor_rollout_ref.rollout.qat": "refused: it has the keys of actor_rollout_ref.actor.fsdp_config.qat",
    "trainer.v1.sampler.custom_sampler.name": "refused: trainer.v1.sampler.custom_sampler.path must be None",
}
"""Verdicts that the syntax does not give, by key or section."""
UNREAD_SECTIONS = ("custom_reward_function.", "reward_model.", "sandbox_fusion.")
"""Sections of older versions."""
_TARGET = "_target_"
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)")
_OTHERS = (True, False, 1, 3, "x")


class VerlKeys:
    """The keys of verl's composed configurations."""

    def __init__(self, trees: Iterable[Mapping[str, Any]], sources: Sources) -> None:
        self._sources = sources
        self.values: dict[str, list[Any]] = defaultdict(list)
        self._classes: dict[str, set[str]] = defaultdict(set)
        self._sections = set[str]()
        for path, value in (entry for tree in trees for entry in walk(tree)):
            section, _, name = path.rpartition(".")
            if name == _TARGET:
                self._classes[section] |= self._ancestors(value)
            elif isinstance(value, Mapping) and value:
                self._sections.add(_plain(name))
            else:
                self.values[path].append(value)
        for path in {path.rpartition(".")[0] for path in self.values} - self._classes.keys():
            words = path.rpartition(".")[2].split("_")
            self._classes[path] = {"".join(word.title() for word in words) + "Config"}
        self._parents: dict[str, set[str]] = defaultdict(set)
        for path in self.values:
            section, _, name = path.rpartition(".")
            if not path.startswith(UNREAD_SECTIONS):
                self._parents[name].add(min(self._classes[section]))

    def _ancestors(self, target: str) -> set[str]:
        module, _, name = target.rpartition(".")
        found = self._sources.find(module, name)
        return (
            {one.name for one in self._sources.ancestors(found)} if isinstance(found, Definition) else {name}
        )

    def is_read(self, path: str, read: KeyRead) -> bool:
        """Return whether a chain reads a key, or passes on a section that has it."""
        parts = path.split(".")
        if not read.whole:
            return self._reads(read.chain, parts)
        return any(self._names(read.chain, parts[:size]) for size in range(1, len(parts)))

    def _names(self, chain: tuple[str, ...], section: list[str]) -> bool:
        """Return whether a chain is a section."""
        if chain[-1].startswith("@"):
            return not self._classes[".".join(section)].isdisjoint(chain[-1][1:].split("|"))
        same = _plain(chain[-1]) == _plain(section[-1])
        return same and (len(chain) == 1 or self._fits(chain[:-1], section[:-1]))

    def _fits(self, chain: tuple[str, ...], above: list[str]) -> bool:
        """Return whether the names before a section may be its section."""
        if not above or chain[-1] == UNKNOWN:
            return True
        if chain[-1].startswith("@"):
            return self._names(chain, above)
        return _plain(chain[-1]) not in self._sections or _plain(chain[-1]) == _plain(above[-1])

    def _reads(self, chain: tuple[str, ...], parts: list[str]) -> bool:
        if chain[-1] != parts[-1] or len(chain) == 1:
            return False
        before = chain[-2]
        if before.startswith("@") or (len(parts) > 1 and _plain(before) == _plain(parts[-2])):
            return self._names(chain[:-1], parts[:-1])
        is_telling = "_" in parts[-1] and len(self._parents[parts[-1]]) == 1
        return is_telling and _plain(before) not in self._sections


def _plain(name: str) -> str:
    return SUFFIX.sub("", name)


def verdicts(keys: VerlKeys, theirs: Iterable[Unit], ours: Iterable[Unit]) -> dict[str, str]:
    """Return the verdict on each key."""
    found = dict.fromkeys(keys.values, WITHOUT_EFFECT)
    for units, who in ((ours, "us"), (theirs, "verl")):
        chains = _by_last(units, guesses=who == "verl")
        for path in found:
            names = {*path.split(".")} | {"@"}
            hits = [place for name in names for read, place in chains[name] if keys.is_read(path, read)]
            if hits:
                found[path] = f"read by {who}: {min(hits)}"
    _follow_references(keys, found)
    for path in found:
        found[path] = next(
            (verdict for name, verdict in DECIDED.items() if is_below(path, name)), found[path]
        )
        if why := _refused(path, keys.values):
            found[path] = f"refused: {why}"
        # The table, which a run prints, knows more than names in the source, and may have no row.
        elif (why := why_without_effect(path)) or found[path] == WITHOUT_EFFECT:
            found[path] = f"{WITHOUT_EFFECT}: {why}"
    return found


def _by_last(units: Iterable[Unit], *, guesses: bool) -> Mapping[str, list[tuple[KeyRead, str]]]:
    """Return the reads, with their places, by their last names. `guesses`: also ones without a section."""
    chains: dict[str, list[tuple[KeyRead, str]]] = defaultdict(list)
    for unit in units:
        for read in unit.reads:
            last = read.chain[-1]
            if guesses or read.chain[:-1] != (UNKNOWN,):
                chains["@" if last.startswith("@") else last].append((read, unit.place))
    return chains


def _follow_references(keys: VerlKeys, found: dict[str, str]) -> None:
    """Count a key as read if another one that is read takes its value."""
    while True:
        new = {
            name: f"{verdict.partition(' through ')[0]} through {path}"
            for path, verdict in found.items()
            if verdict != WITHOUT_EFFECT
            for value in keys.values[path]
            for name in _referred(path, value)
            if found.get(name) == WITHOUT_EFFECT
        }
        if not new:
            return
        found |= new


def _referred(path: str, value: Any) -> Iterator[str]:
    for name in _REFERENCE.findall(value) if isinstance(value, str) else ():
        yield f"{path.rpartition('.')[0]}{name}" if name.startswith(".") else name


def _refused(path: str, values: Mapping[str, list[Any]]) -> str | None:
    """Return the rule with which any other value of a key, or its section's switch, is refused."""
    sections = [*_above(path)]
    for row in RULES:
        switch, _, name = row.path.rpartition(".")
        is_off = name in ("enable", "enabled") and switch in sections and row.rule == "must be False"
        if row.when is ALWAYS and (row.path in (path, *sections) or is_off):
            others = [one for one in _OTHERS if one not in values.get(row.path, ())]
            if not any(row.allowed(one) for one in others):
                return row.rule if row.path == path else f"{row.path} {row.rule}"
    return None


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def of_tree(root: Path, folder: Path) -> dict[str, str]:
    """Return the verdicts for the tree at `root`, as the series of `folder` patches it."""
    contents, _ = trees.patched(root, series.load_series(folder))
    sources = trees.sources_of(root, contents)
    composed = keys_of_tree(root, OF_ALL_ENGINES)
    return verdicts(VerlKeys(composed.values(), sources), *units_of_a_run(sources))


def as_text(found: Mapping[str, str]) -> str:
    """Return the contents of the file."""
    return "".join(f"{path}\t{verdict}\n" for path, verdict in sorted(found.items()))


def main() -> None:
    """Write the verdicts for the pinned tree."""
    folder = patches_dir()
    root = verl_source.default_verl_root(folder)
    verl_source.check_version(root, verl_source.read_pin(folder))
    (folder / FILE).write_text(as_text(of_tree(root, folder)), encoding="utf-8")


if __name__ == "__main__":
    main()

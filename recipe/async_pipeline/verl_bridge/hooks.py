# SPDX-License-Identifier: Apache-2.0
"""Where verl calls this package. The patches on verl import no other module.

verl's patched entry point calls these functions in this order:

    __main__     driver         `rewrite_command_line`   before hydra composes the config
    main         driver         `prepare`      before verl validates the config
    run_ppo      driver         `wait_for`     after the trainer's process was started
    TaskRunner   trainer's      `begin`        before verl looks its trainer up

Other entry points of verl have no patch: the plugin calls `rewrite_on_import` in place of the first, and
`entry_points` calls `prepare`. Without the patches,
`trainer.v1.trainer_mode=async_pipeline` leads to one call in their place:

    TaskRunner   trainer's      `adopt`        when verl makes the trainer; see trainer/entry.py

A run without the switch only has its keys checked. Importing this module loads neither
torch, verl nor Ray, so a fault in the rest of the package cannot stop such a run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import DictConfig, OmegaConf

from ..config.keys.entry_points import EntryPoint, entry_of_program, trains_without
from ..config.keys.older_verl import asks_for_pipeline, modernised
from ..config.keys.overrides import quote_names
from ..config.keys.translation import is_enabled, require_no_stray_keys
from ..config.knobs.schema import is_strategy
from ..config.paths import OWN, RUNTIME
from ..console import EXIT_USERS, echo
from ..errors import AsyncPipelineError
from ..observe.causes import causes
from ..observe.table import marked


def rewrite_command_line(
    argv: list[str], entry: EntryPoint | None = None, *, switched_on: bool = False
) -> None:
    """Rewrite the words of a command line that were written for another verl, with a note on each.

    `argv` begins with the program and is changed in place. Nothing changes without the switch, which a file
    may have (`switched_on`). `entry`: the entry point, if it is not main_ppo, for which keys that no code
    reads get a note. Exits with status 2 and a line for each problem if the config lacks a key.
    """
    words = [word for word in argv[1:] if "=" in word and not word.startswith("-")]
    if not (switched_on or asks_for_pipeline(words)):
        return
    from .rules.spelling import without_unread
    from .rules.verl_keys import has_key

    rewritten, notes, problems = modernised(words, has_key)
    others = [word for word in argv[1:] if word not in words]
    if entry is None and not others:  # a configuration of the user may read any key
        rewritten, more = without_unread(rewritten)
        notes = (*notes, *more)
    argv[1:] = [*others, *map(quote_names, rewritten)]
    for note in notes:
        echo(marked(note))
    try:
        from .launch.command_line import check_command_line

        check_command_line(argv[1:], problems, entry)
    except AsyncPipelineError as error:
        _refuse(error.report)


def rewrite_on_import() -> None:
    """Rewrite this process's command line if its program is an entry point of verl other than main_ppo.

    Exits with status 2 and one line if it asks a program for the pipeline that would ignore it.
    """
    at = len(sys.orig_argv) - len(sys.argv)
    if at < 0:
        return
    # A spawned process has the arguments of its parent, but another program.
    program = sys.orig_argv[at]
    if (entry := entry_of_program(program)) is not None:
        rewrite_command_line(sys.argv, entry)
    elif trains_without(program) and asks_for_pipeline(sys.argv[1:]):
        _refuse(
            f"async_pipeline=True is not known to {program}, which would ignore it; start "
            "verl.trainer.main_ppo, or leave it out"
        )


def prepare(config: DictConfig, problems: tuple[str, ...] = ()) -> None:
    """Rewrite a config that enables the pipeline so that verl runs it; leave other configs unchanged.

    `problems` are known already, one line each. Exits with status 2 and one line on standard error for each
    problem if the config cannot run, if it sets a key of this package without the switch, or if it has the
    switch and this package cannot be imported.
    """
    try:
        raw = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
        if not is_enabled(raw):
            require_no_stray_keys(raw)
            return
    except AsyncPipelineError as error:
        _refuse(str(error))

    try:
        from .launch import prepare as launch
    except Exception as error:  # noqa: BLE001  a broken installation may raise anything
        _refuse(
            f"async_pipeline=True, but recipe.async_pipeline cannot be imported "
            f"({type(error).__name__}: {error}); reinstall it in this environment, then retry"
        )
    launch.prepare(config, problems)


def wait_for(running: Any, config: DictConfig) -> None:
    """Check the cluster, start the sample store while the trainer's process imports, and wait for the end.

    `running` is Ray's reference to the run; its result is left to the caller. Returns immediately if the run
    uses one of verl's trainers. Raises KeyboardInterrupt after Ctrl-C, once the run has ended or its time to
    end is over. Exits with status 2 and one line if the cluster has too few devices.
    """
    if not _has_our_trainer(config):
        return
    from .launch import prepare as launch
    from .process import interrupts

    with causes():
        launch.check_cluster(config)
        launch.start_sample_store(config)
    run_dir = Path(str(OmegaConf.select(config, f"{RUNTIME}.run_dir")))
    interrupts.wait_for(running, run_dir, OmegaConf.select(config, f"{OWN}.faults.notice_s") or 0.0)


def begin(config: DictConfig) -> None:
    """Register this package's trainers with verl and start the rollout servers early.

    Returns immediately if the run uses one of verl's trainers. Raises ConfigError, after one line about the
    cause, if this process cannot run the trainer.
    """
    if not _has_our_trainer(config):
        return
    with causes():
        _begin(config)


def adopt(config: DictConfig) -> None:
    """Prepare the config of a run that verl has started, and the trainer's process, which calls this.

    Raises ConfigError or PatchedVerlRequired, after one line about the cause, if the run cannot start.
    """
    from .launch import prepare as launch

    with causes():
        launch.adopt(config)
        _begin(config)


def _begin(config: DictConfig) -> None:
    from .trainer import registration

    registration.begin(config)


def _has_our_trainer(config: DictConfig) -> bool:
    """Return whether `prepare` chose the trainer. The section alone may also come from a default config."""
    return is_strategy(str(OmegaConf.select(config, "trainer.v1.trainer_mode")))


def _refuse(reason: str) -> NoReturn:
    echo(marked(reason), file=sys.stderr)
    raise SystemExit(EXIT_USERS) from None

# SPDX-License-Identifier: Apache-2.0
"""Each row of the tables refuses a wrong value, with its own key and words."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.checks import verl_options
from recipe.async_pipeline.config.checks.refusals import Refusal, Settings, refuse
from recipe.async_pipeline.config.checks.verl_options import RULES
from recipe.async_pipeline.config.paths import nested
from recipe.async_pipeline.errors import ConfigError

TABLES = [rows for name, rows in vars(verl_options).items() if name.isupper() and isinstance(rows, tuple)]
EVERY_ROW = [row for rows in TABLES for row in rows if isinstance(row, Refusal)]
SUPPORTED_ELSEWHERE: dict[str, list[Any]] = {
    "trainer.v1.trainer_mode": ["separate_async"],
    "actor_rollout_ref.rollout.checkpoint_engine.backend": ["nccl"],
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": [7],
    "actor_rollout_ref.rollout.name": ["trtllm"],
    "actor_rollout_ref.rollout.mode": ["sync"],
    "actor_rollout_ref.rollout.data_parallel_size": [2],
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": [2],
    "actor_rollout_ref.rollout.quantization": ["torchao"],
    "actor_rollout_ref.rollout.dtype": ["float8_e4m3fn"],
    "actor_rollout_ref.actor.strategy": ["automodel"],
}
"""Values that verl knows, in addition to the ones that nothing knows."""


@pytest.mark.parametrize("row", RULES, ids=lambda row: row.path)
def test_a_wrong_value_is_refused(row: Refusal) -> None:
    values = ["nonsense", *SUPPORTED_ELSEWHERE.get(row.path, [])]
    values += [value for value in (None, True, -1, 0, 1.5) if not row.allowed(value)]
    for value in values:
        with pytest.raises(ConfigError) as caught:
            refuse([row], Settings(nested({row.path: value})))
        assert str(caught.value) == f"{row.path} {row.rule}, got {value!r}; {row.remedy}"


@pytest.mark.parametrize("row", EVERY_ROW, ids=lambda row: row.path)
def test_a_row_reads_as_a_sentence(row: Refusal) -> None:
    assert row.rule.startswith(("must ", "requires ")) and row.remedy and "\n" not in row.rule + row.remedy


def test_no_key_has_two_unconditional_rows() -> None:
    assert len({row.path for row in RULES}) == len(RULES)

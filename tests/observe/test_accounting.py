# SPDX-License-Identifier: Apache-2.0
"""An account whose device-seconds do not add up is an error."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.observe.accounting import Accounting, AccountingError, PoolAccount


def test_sums_that_do_not_add_up_are_an_error() -> None:
    pool = PoolAccount(devices=2, roles=("train",))
    pool.seconds["none"] = 3.0
    with pytest.raises(
        AccountingError, match=r"pool train: 3\.0+ device-seconds are accounted for, 4\.0+ have passed"
    ):
        Accounting(wall_s=2.0, pools={"train": pool}, steps=(), steady_s=0.0).check()

# SPDX-License-Identifier: Apache-2.0
"""Device-seconds that do not add up are an error."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.observe.accounting import Accounting, AccountingError, PoolAccount


def test_check_rejects_sums_that_do_not_add_up() -> None:
    pool = PoolAccount(devices=2, roles=("train",))
    pool.seconds["none"] = 3.0
    with pytest.raises(AccountingError, match=r"pool train: 3\.0+ of 4\.0+ device-seconds are accounted for"):
        Accounting(wall_s=2.0, pools={"train": pool}, steps=(), steady_s=0.0).check()

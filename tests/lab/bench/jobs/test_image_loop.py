# SPDX-License-Identifier: Apache-2.0
"""The loop of a benchmark draws as the package's own does, and tells when, and which sample it is."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from recipe.async_pipeline.lab.bench.measuring import spans
from recipe.async_pipeline.lab.bench.measuring.spans import SPANS_DIR, read_spans
from tests.fakes.image_client import ROW, Client, draw

pytestmark = pytest.mark.real_engine


def test_an_image_has_spans_and_the_number_of_its_sample(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans.of_this_job.cache_clear()
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    output = draw(module.ImageLoop, Client(), {**ROW, "session_id": 3})
    assert output.extra_fields["session"] == 3 and len(output.response_ids) == 3
    assert sorted(one.name for one in read_spans(tmp_path)) == ["episode", "generate"]

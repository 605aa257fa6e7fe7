# SPDX-License-Identifier: Apache-2.0
"""The agent loop of images in a benchmark: this package's own, with spans."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ....verl_bridge.agent_loop.diffusion_loop import DiffusionLoop
from ..measuring.spans import of_this_job


class ImageLoop(DiffusionLoop):
    """Draws one image."""

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> Any:
        """Return the image; the judge gets the number of the sample within `extra_info`."""
        prompt, started = int(row["index"]), time.monotonic()
        with of_this_job().measure("generate"):
            output = await super().run(sampling_params, **row)
        of_this_job().add("episode", started, prompt=prompt)
        output.extra_fields["session"] = int(row["session_id"])
        return output

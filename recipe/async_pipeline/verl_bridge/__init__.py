# SPDX-License-Identifier: Apache-2.0
"""The only subpackage that may import verl or Ray.

Importing it imports neither. In the process of a rollout server, it starts to load the engine in the
background, which takes seconds; see `cpu/prefork.py`.
"""

import os

if "ASYNC_PIPELINE_EARLY_ENGINE" in os.environ:
    from .cpu import prefork

    prefork.begin()

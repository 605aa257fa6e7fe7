# SPDX-License-Identifier: Apache-2.0
"""A module whose import sets a variable, as some of vLLM's do, and defines an actor, as verl's do."""

import os

import ray

os.environ["SET_BY_AN_IMPORT"] = "1"


@ray.remote
class Actor:
    """Ray draws a random id for it."""

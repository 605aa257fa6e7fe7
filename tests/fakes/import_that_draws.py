# SPDX-License-Identifier: Apache-2.0
"""A module whose import draws a random id of Ray."""

import ray

ray.ObjectRef.from_random()

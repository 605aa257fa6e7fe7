# SPDX-License-Identifier: Apache-2.0
"""The only part of this package that may import verl or Ray, and the one that acts on them.

Importing it imports neither. In the process of a rollout server it starts loading the engine, which takes
long; see `rollout/vllm/prefork.py`.
"""

from .rollout.vllm import prefork

prefork.begin()

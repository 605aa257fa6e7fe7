# SPDX-License-Identifier: Apache-2.0
"""The only part of this package that may import verl or ray. Importing it imports neither; in the process of
a rollout
server it starts what takes long, see `early_engine`.

The modules on the patched tree (`unified_diff`, `patches`, `verl_source`, `patch_command`) are the exception
within the exception: they read verl's files and import nothing of it, so that they also work on a tree that
cannot be imported.
"""

from .rollout.vllm import prefork

prefork.begin()

# SPDX-License-Identifier: Apache-2.0
"""A version in shared memory of one host: segments, arenas, manifests, boards."""

# SPDX-License-Identifier: Apache-2.0
"""Calls of Ray's actors: waits with deadlines, calls past a queue, actors that restart."""

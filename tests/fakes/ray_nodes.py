# SPDX-License-Identifier: Apache-2.0
"""Ray nodes on this machine. A start that a busy machine is too slow for is repeated."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
from ray.cluster_utils import Cluster

from recipe.async_pipeline.processes import repeat_slow_start
from recipe.async_pipeline.verl_bridge.launch.ray_cluster import end_failed_node
from tests import HANG_S


def start_ray(**options: Any) -> None:
    """Start a cluster of one node and connect to it; `ray.shutdown` ends it."""
    start = partial(ray.init, num_cpus=1, include_dashboard=False, log_to_driver=False, **options)
    repeat_slow_start(start, end_failed_node)


def start_cluster(**head: Any) -> Any:
    """Return a `Cluster` whose head node has these options."""
    start = partial(Cluster, initialize_head=True, head_node_args={"include_dashboard": False, **head})
    return repeat_slow_start(start, end_failed_node)


def add_node(cluster: Any, **options: Any) -> Any:
    """Return a new node of the cluster."""
    known = set(cluster.worker_nodes)

    def forget(error: Exception) -> None:
        end_failed_node(error)
        cluster.worker_nodes &= known
        # Ray gives work to a dead node until it has noticed the death.
        cluster.wait_for_nodes(HANG_S)

    return repeat_slow_start(partial(cluster.add_node, **options), forget)

# SPDX-License-Identifier: Apache-2.0
"""Refuse an update that would not replay the recorded routing of every token and layer."""

from __future__ import annotations

from typing import Any

from verl.utils import tensordict_utils as tu

from ....errors import RoutingError

ROUTES = "routed_experts"
"""verl's column with the experts of each token and layer, as recorded with the old log-probs."""


def replays(engine_config: Any) -> bool:
    """Return whether an engine is configured to replay recorded routing."""
    return getattr(getattr(engine_config, "router_replay", None), "mode", "disabled") != "disabled"


def require_routes(engine: Any, data: Any) -> None:
    """Raises RoutingError if a router would choose by itself in an update with `data`.

    verl then replays nothing and raises no error: if the batch does not ask for it, or if a router is not in
    verl's list, which another engine of the process empties when it is built.
    """
    from verl.utils.megatron.router_replay_patch import RouterReplay
    from verl.utils.megatron.router_replay_utils import iter_model_routers

    asked = tu.get_non_tensor_data(data, key="enable_routing_replay", default=False)
    if not asked or data.get(ROUTES, None) is None:
        raise RoutingError(
            "router_replay is set, but the update got no recorded routing; compute old log-probs with "
            "workers of the same configuration"
        )
    listed = {id(router) for router in RouterReplay.router_instances}
    if odd := sum(id(router) not in listed for _, router in iter_model_routers(engine.module)):
        raise RoutingError(
            f"router_replay is set, but {odd} routers of the actor would choose by themselves; another model "
            "of this process has taken their place: give it separate devices"
        )

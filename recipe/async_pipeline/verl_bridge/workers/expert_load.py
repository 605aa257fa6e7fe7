# SPDX-License-Identifier: Apache-2.0
"""How evenly a mixture of experts spreads the tokens that it is trained on.

Hooks count the choices of each router of transformers or megatron-core during the forward passes of an
update. A pass that gradient checkpointing repeats counts twice, which changes no ratio.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu

from ...errors import RoutingError

ROUTER = "topkrouter"
"""The end of the routers' class names, in lower case, in both libraries."""
BUSIEST, WORST, UNUSED = "moe/busiest_expert", "moe/busiest_expert_worst_layer", "moe/unused_experts"


class ExpertLoad:
    """The number of tokens that each expert of this rank's layers got since the last `take`."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """A collective."""
        routers = [
            router
            for module in modules
            for router in module.modules()
            if type(router).__name__.lower().endswith(ROUTER)
        ]
        layers = experts = 0
        for index, router in enumerate(routers, start=1):
            # Megatron numbers its layers over all stages of a pipeline, from 1.
            layer = int(getattr(router, "layer_number", None) or index)
            router.register_forward_hook(partial(self._count, layer))
            layers, experts = max(layers, layer), max(experts, experts_of(router))
        self._shape = _largest(layers, experts)
        self._counts: dict[int, torch.Tensor] = {}

    def _count(self, layer: int, router: torch.nn.Module, arguments: Any, output: Any) -> None:
        chosen = tokens_of(output, self._shape[1])
        if chosen is not None:
            before = self._counts.get(layer)
            self._counts[layer] = chosen if before is None else before + chosen

    def clear(self) -> None:
        """Forget what was counted."""
        self._counts = {}

    def take(self) -> dict[str, float]:
        """Return the metrics of what was counted on all ranks, and forget it. A collective.

        Returns nothing for a model without experts.
        """
        counts, self._counts = self._counts, {}
        if not all(self._shape):
            return {}
        table = torch.zeros(self._shape, dtype=torch.int64)
        for layer, count in counts.items():
            table[layer - 1] = count.cpu()
        if _ranks() > 1:
            # Ranks that hold the same tokens count them several times, all of them alike.
            dist.all_reduce(table)
        return load_metrics(table)


def experts_of(router: Any) -> int:
    """Return the number of experts that a router chooses from."""
    return int(getattr(router, "num_experts", None) or getattr(router.config, "num_moe_experts", None) or 0)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _largest(*sizes: int) -> tuple[int, ...]:
    """Return the largest of each size on any rank: a stage of a pipeline may have no layer with experts."""
    if _ranks() == 1:
        return sizes
    of_ranks: list[tuple[int, ...]] = [sizes] * _ranks()
    dist.all_gather_object(of_ranks, sizes)
    return tuple(max(column) for column in zip(*of_ranks, strict=True))


def tokens_of(output: Any, num_experts: int) -> torch.Tensor | None:
    """Return how many tokens a router's output gives to each expert, int64 of shape (experts,).

    megatron-core returns a map of bools, (tokens, experts), and transformers indices, (tokens, choices).
    Returns None for any other output.
    """
    last = output[-1] if isinstance(output, tuple) else output
    if not isinstance(last, torch.Tensor) or last.dim() != 2:
        return None
    if last.dtype == torch.bool:
        return last.sum(0)
    if last.is_floating_point() or num_experts < 1:
        return None
    chosen = last.reshape(-1).long()
    # `bincount` would make an accelerator wait.
    return torch.zeros(num_experts, dtype=torch.int64, device=last.device).scatter_add_(
        0, chosen, torch.ones_like(chosen)
    )


def load_metrics(counts: torch.Tensor) -> dict[str, float]:
    """Return the metrics of tokens by layer and expert, (layers, experts).

    `busiest_expert` is the largest number of tokens of an expert relative to an even spread, as a mean over
    the layers: 1 at best, the number of experts at worst. `unused_experts` is the share of experts without a
    token. Layers without experts have no tokens and do not count.
    """
    routed = counts[counts.sum(1) > 0].double()
    if not len(routed):
        return {}
    busiest = routed.amax(1) / routed.mean(1)
    return {
        BUSIEST: float(busiest.mean()),
        WORST: float(busiest.max()),
        UNUSED: float((routed == 0).double().mean()),
    }


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

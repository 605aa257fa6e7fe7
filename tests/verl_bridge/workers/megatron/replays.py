# SPDX-License-Identifier: Apache-2.0
"""Record how tokens are routed, change the routers, replay the record, and compare with transformers.

`layouts.py` forks the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.verl_bridge.workers.megatron.layouts import (
    PROMPT,
    Check,
    Layout,
    distance,
    log_softmax,
    negative_log_likelihood,
    parallel,
    reference,
)

LAYOUTS = {
    "replay-ep2": Layout("qwen3_moe", 2, parallel(expert=2)),
    "replay-tp2-ep2": Layout("qwen3_moe", 2, parallel(tensor=2, expert=2, expert_tensor=1)),
    "replay-pp2": Layout("qwen3_moe", 2, parallel(pipeline=2)),
}
CHANGE = 0.3
"""Standard deviation of what is added to the routers' weights between record and replay."""


def check(folder: Path, name: str, layout: Layout) -> dict[str, Any]:
    from verl.workers.config import EngineRouterReplayConfig

    sizes = {**layout.sizes, "router_replay": EngineRouterReplayConfig(mode="R2")}
    return Replay(folder, name, replace(layout, sizes=sizes)).run()


class Replay(Check):
    """One rank of one layout."""

    def run(self) -> dict[str, Any]:
        model = reference(self.path)
        routers = Routers(model)
        routes = self.routes_of_rows(self.infer())
        chosen = {row: routers.choices(tokens) for row, tokens in enumerate(self.rows)}
        measured: dict[str, Any] = {
            "outputs": self.engine.is_mp_src_rank_with_outputs(),
            "recorded": [same_experts(routes[row], chosen[row]) == 1 for row in chosen],
        }

        routers.change()
        self.change()
        rerouted = [same_experts(routes[row], routers.choices(self.rows[row])) for row in chosen]
        measured["kept"] = sum(rerouted) / len(rerouted)

        expected = []
        for row, tokens in enumerate(self.rows):
            with routers.forced(routes[row]):
                expected.append(log_softmax(model, tokens)[:-1].gather(1, tokens[1:, None])[:, 0])
        for way, output in (("replayed", self.infer(routes)), ("native", self.infer())):
            if output:
                measured[way] = max(
                    distance(found[:-1], expected[row])
                    for row, found in zip(self.mine(), output["log_probs"].unbind(), strict=True)
                )

        tokens = sum(len(row) - PROMPT for row in self.rows)
        torch.stack([-row[PROMPT - 1 :].sum() / tokens for row in expected]).sum().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        with self.engine.train_mode():
            trained = self.engine.train_batch(self.replayed_batch(routes), negative_log_likelihood)
        if measured["outputs"]:
            measured["grad_norm"] = [float(trained["metrics"]["grad_norm"]), norm]
        measured["refused"] = self.refusals(routes)
        return measured

    def refusals(self, routes: dict[int, torch.Tensor]) -> list[str]:
        """Return why an update is refused, or "": with routes, without any, with routes that are not to be
        replayed, and with a router that verl has lost.
        """
        from verl.utils.megatron.router_replay_patch import RouterReplay

        asked, silent = self.replayed_batch(routes), self.batch()
        silent["routed_experts"] = asked["routed_experts"]
        found = [refusal(self.engine, data) for data in (asked, self.replayed_batch(None), silent)]
        RouterReplay.router_instances.pop()
        return [*found, refusal(self.engine, asked)]

    def infer(self, routes: dict[int, torch.Tensor] | None = None) -> Any:
        """Return the model's outputs, or None on a rank without any. Without routes it records some."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(self.replayed_batch(routes))
        return output["model_output"] if self.engine.is_mp_src_rank_with_outputs() else None

    def replayed_batch(self, routes: dict[int, torch.Tensor] | None) -> Any:
        from verl.utils import tensordict_utils as tu

        data = self.batch()
        tu.assign_non_tensor(data, enable_routing_replay=True)
        if routes is not None:
            mine = [routes[row].to(torch.int16) for row in self.mine()]
            data["routed_experts"] = torch.nested.as_nested_tensor(mine, layout=torch.jagged)
        return data

    def routes_of_rows(self, output: Any) -> dict[int, torch.Tensor]:
        """Return of each row the experts of its tokens, (tokens, layers, choices). A collective."""
        mine = {}
        if output:
            mine = dict(zip(self.mine(), output["routed_experts"].unbind(), strict=True))
        of_ranks: list[dict[int, torch.Tensor]] = [{}] * self.layout.ranks
        dist.all_gather_object(of_ranks, mine)
        return {row: routes.long() for of_rank in of_ranks for row, routes in of_rank.items()}

    def change(self) -> None:
        from verl.utils.megatron.router_replay_utils import TopKRouter

        for chunk in self.engine.module:
            for router in chunk.modules():
                if isinstance(router, TopKRouter):
                    add_noise(router.weight, router.layer_number)


def refusal(engine: Any, data: Any) -> str:
    from recipe.async_pipeline.errors import RoutingError
    from recipe.async_pipeline.verl_bridge.workers.expert_load import require_routes

    try:
        require_routes(engine, data)
    except RoutingError as error:
        return str(error)
    return ""


class Routers:
    """The routers of a model of transformers, which choose by themselves or as recorded."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._routers = [layer.mlp.gate for layer in model.model.layers]
        self._told: torch.Tensor | None = None
        self._seen: dict[int, torch.Tensor] = {}
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(lambda router, _, output, layer=layer: self._choose(layer, output))

    def _choose(self, layer: int, output: Any) -> Any:
        logits, _, indices = output
        if self._told is None:
            self._seen[layer] = indices
            return output
        indices = self._told[:, layer]
        scores = logits.softmax(-1).gather(1, indices)
        return logits, scores / scores.sum(-1, keepdim=True), indices

    def choices(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the experts that the routers choose for a row, (tokens, layers, choices)."""
        log_softmax(self.model, tokens)
        return torch.stack([self._seen[layer] for layer in range(len(self._routers))], 1)

    @contextmanager
    def forced(self, routes: torch.Tensor) -> Iterator[None]:
        """Let the routers choose `routes`."""
        self._told = routes
        try:
            yield
        finally:
            self._told = None

    def change(self) -> None:
        for layer, router in enumerate(self._routers, start=1):
            add_noise(router.weight, layer)


def add_noise(weight: torch.Tensor, layer: int) -> None:
    """Change a router's weights, in both libraries alike. `layer` counts from 1."""
    generator = torch.Generator().manual_seed(100 + layer)
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=generator) * CHANGE)


def same_experts(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the share of tokens and layers with the same experts, in any order."""
    return float((one.sort(-1).values == other.sort(-1).values).all(-1).float().mean())

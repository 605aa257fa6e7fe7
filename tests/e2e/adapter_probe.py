# SPDX-License-Identifier: Apache-2.0
"""SGLang with LoRA adapters, loaded while it answers. Run as a script: MODEL_DIR; prints one JSON object.

Each version is another adapter, some of them loaded in the middle of an answer: all tokens must be likeliest
to transformers and peft with the same adapter.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import adapter_of, described, part_of
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket
from tests.e2e.probed_engines import SGLangWithAdapters, import_once
from tests.e2e.versions_probe import Probe, below_likeliest

RANK, ALPHA = 4, 12
LOADS = 6
"""For each way to treat requests in flight."""
TOKENS = 12


class AdapterProbe(Probe):
    def __init__(self, model_dir: str) -> None:
        super().__init__(model_dir, lambda folder, length: SGLangWithAdapters(folder, length, RANK))
        settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
        self.model = get_peft_model(self.model, settings)

    def gather(self, weights: dict[str, torch.Tensor]) -> WeightTicket:
        parts = [part_of(name, tensor) for name, tensor in weights.items()]
        ticket = self.writer.gather_parts(self.version, parts, described(self.model.peft_config["default"]))
        assert ticket is not None
        return ticket

    def randomize(self) -> dict[str, torch.Tensor]:
        tensors = adapter_of(self.model)
        for tensor in tensors.values():
            tensor.copy_(torch.randn_like(tensor) * 0.2)
        return tensors


async def run(model_dir: str) -> dict[str, Any]:
    probe = AdapterProbe(model_dir)
    await probe.engine.register()
    torch.manual_seed(5)
    chance = random.Random(0)
    report: dict[str, Any] = {}
    await probe.publish(probe.randomize(), "keep")
    for in_flight in ("keep", "abort", "drain"):
        report[in_flight] = [
            await probe.swap(in_flight, "host", chance.uniform(0, 0.05)) for _ in range(LOADS)
        ]
    said, _ = await probe.answer(TOKENS)
    with probe.model.disable_adapter():
        report["below_likeliest_to_base"] = below_likeliest(probe.model, said, 0, TOKENS)
    report["versions"] = probe.version
    probe.writer.close()
    probe.engine.shutdown()
    return report


if __name__ == "__main__":
    import_once("sglang")
    sys.stdout.write("\nREPORT " + json.dumps(asyncio.run(run(sys.argv[1]))) + "\n")

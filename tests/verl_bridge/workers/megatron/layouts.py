# SPDX-License-Identifier: Apache-2.0
"""Run verl's Megatron engine in several layouts and compare it with transformers.

Arguments: FOLDER LAYOUT... (`LAYOUTS`, and the ones of `replays` and `values`). The stack is imported once;
the ranks of each layout are forked. Each rank writes what it measured to FOLDER/LAYOUT.RANK.json, or its
traceback to FOLDER/LAYOUT.RANK.error. What holds for the installed Megatron in any layout is in
FOLDER/upstream.json.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import REPOSITORY

LENGTHS = (17, 24, 9, 30)
"""Tokens of each row of the batch."""
PROMPT = 4
"""Tokens of each row that the loss leaves out."""
EPSILON = 1e-4
"""AdamW's; the smaller it is, the more a first step depends on rounding errors of tiny gradients."""
LIMIT_S = 240.0
ENVIRONMENT = {
    **os.environ,
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(REPOSITORY),
}
"""Of a process that runs layouts."""


@dataclass(frozen=True)
class Layout:
    """A model on some ranks."""

    family: str
    ranks: int = 1
    sizes: dict[str, Any] = field(default_factory=dict)
    """Fields of verl's engine config."""
    packed: bool = True
    resumes: bool = False
    """Also save a checkpoint, train on, load it and repeat the step."""


def parallel(**sizes: int) -> dict[str, Any]:
    """Return fields of verl's engine config: tensor=2 for tensor_model_parallel_size=2."""
    return {
        f"{name}_parallel_size" if name == "expert_tensor" else f"{name}_model_parallel_size": size
        for name, size in sizes.items()
    }


LAYOUTS = {
    "dense": Layout("qwen3"),
    "dense-padded": Layout("qwen3", packed=False),
    "dense-dp2": Layout("qwen3", 2),
    "dense-tp2": Layout("qwen3", 2, parallel(tensor=2), resumes=True),
    "dense-tp2-without-sequence-parallel": Layout(
        "qwen3", 2, {**parallel(tensor=2), "sequence_parallel": False}
    ),
    "dense-pp2": Layout("qwen3", 2, parallel(pipeline=2)),
    "tied-tp2": Layout("qwen2", 2, parallel(tensor=2)),
    "tied-pp2": Layout("qwen2", 2, parallel(pipeline=2)),
    "moe": Layout("qwen3_moe"),
    "moe-ep2": Layout("qwen3_moe", 2, parallel(expert=2), resumes=True),
    "moe-tp2-ep2": Layout("qwen3_moe", 2, parallel(tensor=2, expert=2, expert_tensor=1)),
    "moe-tp2-etp2": Layout("qwen3_moe", 2, parallel(tensor=2, expert_tensor=2)),
    "moe-pp2": Layout("qwen3_moe", 2, parallel(pipeline=2)),
}


def main(folder: Path, names: list[str]) -> int:
    """Return the number of ranks that failed."""
    started = time.monotonic()
    from tests.verl_bridge.workers.megatron import replays, tiny_models, values

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    upstream = import_stack()
    works = {
        **dict.fromkeys(LAYOUTS, check),
        **dict.fromkeys(replays.LAYOUTS, replays.check),
        **dict.fromkeys(values.LAYOUTS, values.check),
    }
    known = LAYOUTS | replays.LAYOUTS | values.LAYOUTS
    for family in {known[name].family for name in names} | {"qwen3"}:
        tiny_models.make(family, folder)
    upstream["rotary_base"] = rotary_base(folder / "qwen3")
    (folder / "upstream.json").write_text(json.dumps(upstream), encoding="utf-8")
    sys.stdout.write(f"imports and models: {time.monotonic() - started:.1f} s\n")
    failed = 0
    for name in names:
        begun = time.monotonic()
        failed += run_ranks(folder, name, known[name], works[name])
        sys.stdout.write(f"{name}: {time.monotonic() - begun:.1f} s\n")
        sys.stdout.flush()
    return failed


def import_stack() -> dict[str, Any]:
    """Import everything that a rank needs, before the forks. Returns the faults that were repaired."""
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    from recipe.async_pipeline.verl_bridge import plugin  # noqa: F401
    from recipe.async_pipeline.verl_bridge.workers.megatron import standin
    from recipe.async_pipeline.verl_bridge.workers.megatron_on_demand import cpu_engines

    postponed = "megatron.core" not in sys.modules
    standin.import_bridge()
    found = [hole.name for hole in standin.HOLES if hole.is_open()]
    cpu_engines()
    return {
        "postponed": postponed,
        "open": found,
        "still_open": [hole.name for hole in standin.HOLES if hole.is_open()],
        "stand_in_left": standin.NAME in sys.modules,
        "cuda": torch.cuda.is_available(),
    }


def rotary_base(model: Path) -> float:
    """Return what Megatron-Bridge makes of the model's rotary base without help."""
    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_pretrained(str(model)).to_megatron_provider(load_weights=False)
    return float(provider.rotary_base)


Work = Callable[[Path, str, Layout], dict[str, Any]]
"""What a rank does, with the folder, the name of its layout and the layout; returns what it measured."""


def check(folder: Path, name: str, layout: Layout) -> dict[str, Any]:
    return Check(folder, name, layout).run()


def run_ranks(folder: Path, name: str, layout: Layout, work: Work = check, limit_s: float = LIMIT_S) -> int:
    """Fork the ranks of a layout and wait for them; return how many failed."""
    sys.stdout.flush()
    pids = []
    for rank in range(layout.ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(folder, name, layout, rank, work)
                code = 0
            except BaseException:  # noqa: BLE001  the parent reads it from the file
                (folder / f"{name}.{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
            finally:
                # megatron-core's checkpoints start a manager, a process that would outlive this one.
                multiprocessing.util._exit_function()  # type: ignore[attr-defined]
                os._exit(code)
        pids.append(pid)
    return sum(1 for code in wait_for(pids, limit_s) if code)


def wait_for(pids: list[int], limit_s: float) -> Iterator[int]:
    """Yield the exit codes. The others get a few seconds after a rank has failed, then they are killed."""
    until = time.monotonic() + limit_s
    left = list(pids)
    while left:
        for pid in tuple(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                until = min(until, time.monotonic() + 5) if code else until
                yield code
        if left and time.monotonic() > until:
            for pid in left:
                os.kill(pid, 9)
            until += 60
        time.sleep(0.02)


def rank_main(folder: Path, name: str, layout: Layout, rank: int, work: Work) -> None:
    # torch builds another thread pool at the first call after a fork. Two threads that come first together
    # meet "Invalid thread pool", so let it happen here, while there is one.
    torch.set_num_threads(torch.get_num_threads())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.ranks), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / name}.meet", rank=rank, world_size=layout.ranks
    )
    measured = work(folder, name, layout)
    (folder / f"{name}.{rank}.json").write_text(json.dumps(measured), encoding="utf-8")
    dist.barrier()


class Check:
    """One rank of one layout."""

    model_type = "language_model"

    def __init__(self, folder: Path, name: str, layout: Layout) -> None:
        self.folder, self.name, self.layout = folder, name, layout
        self.path = str(folder / layout.family)
        generator = torch.Generator().manual_seed(5)
        self.rows = [torch.randint(3, 512, (length,), generator=generator) for length in LENGTHS]
        self.engine = self.make_engine()

    def make_engine(self) -> Any:
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import HFModelConfig, McoreOptimizerConfig
        from verl.workers.engine import EngineRegistry

        from recipe.async_pipeline.verl_bridge.workers.megatron.config import Float32EngineConfig

        engine = EngineRegistry.new(
            self.model_type,
            "megatron",
            model_config=HFModelConfig(
                path=self.path, use_remove_padding=self.layout.packed, model_type=self.model_type
            ),
            engine_config=Float32EngineConfig(
                dtype="float32",
                use_dynamic_bsz=False,
                use_remove_padding=self.layout.packed,
                **self.layout.sizes,
            ),
            optimizer_config=McoreOptimizerConfig(
                lr=1e-3,
                lr_decay_steps=10,
                lr_decay_style="constant",
                weight_decay=0.01,
                clip_grad=1.0,
                lr_warmup_steps=0,
                override_optimizer_config={"adam_eps": EPSILON},
            ),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
        return engine

    def run(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        model = reference(self.path)
        measured: dict[str, Any] = {"outputs": self.engine.is_mp_src_rank_with_outputs()}
        measured["before"] = self.compare_outputs(model)

        exported, file = self.export(), load_file(f"{self.path}/model.safetensors")
        measured["names"] = sorted(set(exported) ^ set(file))
        measured["different"] = [name for name in file if not torch.equal(file[name], exported[name])]

        output = self.train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=EPSILON
        )
        loss_of(model, self.rows).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        if measured["outputs"]:
            measured["grad_norm"] = [float(output["metrics"]["grad_norm"]), norm]

        after, expected = self.export(), unfused(dict(model.state_dict()))
        measured["gather"] = self.gather(after)
        measured["moved"] = max(distance(after[name], exported[name]) for name in after)
        measured["apart"] = max(distance(after[name], expected[name]) for name in after)
        measured.update(self.resume() if self.layout.resumes else {})
        return measured

    def export(self) -> dict[str, torch.Tensor]:
        weights, _ = self.engine.get_per_tensor_param()
        return {name: weight.detach().clone() for name, weight in weights}

    def gather(self, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Put the parts of all ranks together and compare them with the assembled tensors."""
        from recipe.async_pipeline.verl_bridge.workers.shards import held_by

        held, loads = held_by(self.engine), held_by(self.engine, replicated=True)
        assert held is not None and loads is not None and held.adapter is None
        different, twice = [], []
        for part in held.parts:
            times = torch.zeros(part.shape)
            joined = torch.zeros(part.shape, dtype=part.dtype)
            if part.values is not None:
                times[part.slices] = 1
                joined[part.slices].view(part.values.shape).copy_(part.values)
            dist.all_reduce(times)
            dist.all_reduce(joined)
            twice += [] if bool((times == 1).all()) else [part.name]
            different += [] if torch.equal(joined, whole[part.name]) else [part.name]
        wrong = [
            part.name
            for part in loads.parts
            if part.values is not None
            and not torch.equal(whole[part.name][part.slices].view(part.values.shape), part.values)
        ]
        return {
            "names": sorted(set(whole) ^ {part.name for part in held.parts}),
            "ordered": [part.name for part in held.parts] == [part.name for part in loads.parts],
            "different": different,
            "not_once": twice,
            "wrong_replica": wrong,
            "held": sum(part.values.numel() for part in held.parts if part.values is not None),
            "falls_back": self.falls_back(),
            "aliases": all(part.values is None or part.values._is_view() for part in held.parts),
        }

    def falls_back(self) -> bool:
        """Return whether no rank publishes parts if the last one has a tensor that is computed."""
        from recipe.async_pipeline.verl_bridge.workers.megatron import shards

        def computed(task: Any) -> Any:
            raise shards.NotRearranged("a tensor is computed")

        pieces_of = shards.pieces_of
        if dist.get_rank() == self.layout.ranks - 1:
            shards.pieces_of = computed
        try:
            return shards.make_plan(self.engine) is None
        finally:
            shards.pieces_of = pieces_of

    def batch(self) -> Any:
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        mine = self.mine()

        def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        masks = [torch.cat([torch.zeros(PROMPT), torch.ones(LENGTHS[row] - PROMPT)]) for row in mine]
        data = TensorDict(
            {
                "input_ids": jagged([self.rows[row] for row in mine]),
                "loss_mask": jagged(masks),
                "position_ids": jagged([torch.arange(LENGTHS[row]) for row in mine]),
                "temperature": torch.ones(len(mine)),
            },
            batch_size=len(mine),
        )
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            calculate_entropy=True,
            pad_mode="no_padding",
            global_batch_size=len(LENGTHS),
        )
        return data

    def mine(self) -> list[int]:
        """Return the rows of this data-parallel rank."""
        return list(range(len(LENGTHS)))[
            self.engine.get_data_parallel_rank() :: self.engine.get_data_parallel_size()
        ]

    def train(self) -> Any:
        with self.engine.train_mode():
            output = self.engine.train_batch(self.batch(), negative_log_likelihood)
        self.engine.lr_scheduler_step()
        return output

    def compare_outputs(self, model: Any) -> dict[str, float] | None:
        """Return the largest differences to a model of transformers, or None on a rank without outputs."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(self.batch())
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        found = output["model_output"]
        log_probs, entropies = found["log_probs"].unbind(), found["entropy"].unbind()
        apart = {"log_probs": 0.0, "entropy": 0.0}
        for index, row in enumerate(self.mine()):
            logits = log_softmax(model, self.rows[row])
            chosen = logits[:-1].gather(1, self.rows[row][1:, None])[:, 0]
            apart["log_probs"] = max(apart["log_probs"], distance(log_probs[index][:-1], chosen))
            entropy = -(logits.exp() * logits).sum(-1)
            apart["entropy"] = max(apart["entropy"], distance(entropies[index], entropy))
        return apart

    def resume(self) -> dict[str, Any]:
        """Save, train, load as a new process does, train again: both give the same weights, bit by bit."""
        from recipe.async_pipeline.checkpoint.tensor_tree import weights_only

        checkpoint = str(self.folder / f"{self.name}.checkpoint")
        saved = self.export()
        self.engine.save_checkpoint(checkpoint, global_step=1)
        dist.barrier()
        self.train()
        first = self.export()
        shared = self.unrepaired_steps(checkpoint)
        for optimizer in self.engine._adams():
            optimizer.state.clear()
        refused = self.unrepaired_load_fails(checkpoint)
        with weights_only(Path(checkpoint)):
            self.engine.load_checkpoint(checkpoint, del_local_after_load=False)
        loaded = self.export()
        self.train()
        second = self.export()
        return {
            "shared_steps": shared,
            "refused": refused,
            "restored": all(torch.equal(saved[name], loaded[name]) for name in saved),
            "repeated": all(torch.equal(first[name], second[name]) for name in first),
            "trained": any(not torch.equal(saved[name], first[name]) for name in first),
        }

    def unrepaired_load(self, checkpoint: str) -> None:
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

        from recipe.async_pipeline.verl_bridge.workers.megatron.cuda_shim import cuda_means_cpu

        with torch.no_grad(), cuda_means_cpu():
            MegatronEngineWithLMHead.load_checkpoint(self.engine, checkpoint, del_local_after_load=False)

    def unrepaired_load_fails(self, checkpoint: str) -> bool:
        """Load as verl does; return whether megatron-core cannot, as the optimizer has no steps."""
        try:
            self.unrepaired_load(checkpoint)
        except AssertionError:
            return True
        return False

    def unrepaired_steps(self, checkpoint: str) -> bool:
        """Load as verl does; return whether all parameters then have one and the same optimizer step."""
        self.unrepaired_load(checkpoint)
        steps = [state["step"] for state in self.engine._adam_states()]
        return len(steps) > 1 and len({id(step) for step in steps}) < len(steps)


def negative_log_likelihood(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Return the mean over all response tokens of all ranks."""
    from verl.utils import tensordict_utils as tu

    log_probs = model_output["log_probs"]
    log_probs = log_probs.values() if log_probs.is_nested else log_probs
    # Position i predicts token i + 1; the last one predicts nothing.
    mask = torch.cat([torch.cat([row[1:], row.new_zeros(1)]) for row in data["loss_mask"].unbind()])
    tokens = tu.get_non_tensor_data(data, key="batch_num_tokens", default=None)
    ranks = tu.get_non_tensor_data(data, key="dp_size", default=1)
    return -(log_probs * mask).sum() / tokens * ranks, {}


def reference(path: str) -> Any:
    """Return the same model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")


def log_softmax(model: Any, row: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=row[None]).logits[0]
    return logits.float().log_softmax(-1)


def loss_of(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of `negative_log_likelihood` in transformers."""
    tokens = sum(len(row) - PROMPT for row in rows)
    losses = []
    for row in rows:
        chosen = log_softmax(model, row)[:-1].gather(1, row[1:, None])[:, 0]
        losses.append(-chosen[PROMPT - 1 :].sum() / tokens)
    return torch.stack(losses).sum()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).abs().max())


def unfused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with each expert by itself, as in the files of a model."""
    split: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        base, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj") or weight.dim() != 3:
            split[name] = weight
            continue
        parts: Callable[[torch.Tensor], Any] = (
            (lambda expert: zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            if kind == "gate_up_proj"
            else (lambda expert: [("down_proj", expert)])
        )
        for index, expert in enumerate(weight):
            for part, values in parts(expert):
                split[f"{base}.{index}.{part}.weight"] = values
    return split


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))

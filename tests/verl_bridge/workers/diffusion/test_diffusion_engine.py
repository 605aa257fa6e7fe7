# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engine trains a transformer of diffusers: the sampler's log-probs, the step by hand, two ranks
as one, and weights that a rollout proves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipe.async_pipeline.errors import CheckpointError, ConfigError
from tests import REPOSITORY

pytestmark = pytest.mark.real_engine
pytest.importorskip("diffusers")
LIMIT_S = 1800.0
"""Ranks import verl first."""
ENVIRONMENT = {
    **os.environ,
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
}
Cell = list[dict[str, Any]]
"""What each rank saved."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `diffusion_ranks.py` has filled."""
    path = tmp_path_factory.mktemp("meet")
    done = subprocess.run(
        [sys.executable, "-m", "tests.verl_bridge.diffusion_ranks", str(path)],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed = {
        name: text
        for name, of_ranks in json.loads(done.stdout.splitlines()[-1]).items()
        for text in of_ranks.values()
        if "Traceback" in text
    }
    assert not failed, failed
    return path


def cell(folder: Path, name: str) -> Cell:
    kind, _, count = name.partition("@")
    return [torch.load(folder / f"{kind}@{count}-{rank}.pt") for rank in range(int(count))]


def joined(of_ranks: Cell, name: str) -> torch.Tensor:
    return torch.cat([one[name] for one in of_ranks])


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("count", [1, 2])
def test_the_trainer_finds_the_log_probs_of_the_sampler(folder: Path, count: int) -> None:
    """Bit for bit, so that every ratio of the first step is exactly 1."""
    found = cell(folder, f"full@{count}")
    assert torch.equal(joined(found, "before"), joined(found, "sampled"))
    assert joined(found, "before").shape == (16, 3)


def test_a_step_is_the_step_of_flow_grpo(folder: Path) -> None:
    (trained,), by_hand = cell(folder, "full@1"), torch.load(folder / "by_hand.pt")
    assert trained["grad_norm"] == pytest.approx(by_hand["grad_norm"], rel=1e-5)
    assert furthest(trained["weights"], by_hand["weights"]) < 1e-6
    assert float((joined([trained], "after") - joined([trained], "before")).abs().max()) > 1e-6, "it trained"


def test_a_guided_step_with_a_divergence_is_the_one_of_flow_grpo(folder: Path) -> None:
    (trained,), by_hand = cell(folder, "guided@1"), torch.load(folder / "by_hand_guided.pt")
    assert trained["kl"] == pytest.approx(by_hand["kl"], rel=1e-5) and by_hand["kl"] > 1e-6
    assert trained["grad_norm"] == pytest.approx(by_hand["grad_norm"], rel=1e-5)
    assert furthest(trained["weights"], by_hand["weights"]) < 1e-6


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_ranks_are_one(folder: Path, kind: str) -> None:
    one, two = cell(folder, f"{kind}@1"), cell(folder, f"{kind}@2")
    torch.testing.assert_close(joined(two, "before"), joined(one, "before"), rtol=0, atol=1e-6)
    torch.testing.assert_close(joined(two, "after"), joined(one, "after"), rtol=0, atol=1e-6)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    assert furthest(two[0]["weights"], one[0]["weights"]) < 1e-6


@pytest.mark.parametrize("name", ["full@1", "full@2", "lora@1", "lora@2", "guided@1"])
def test_a_rollout_loads_and_proves_what_was_trained(folder: Path, name: str) -> None:
    """Its log-probs are the trainer's after the step, not those before."""
    for of_rank in cell(folder, name):
        assert of_rank["proved"] == [of_rank["published"]]
        torch.testing.assert_close(of_rank["of_rollout"], of_rank["after"], rtol=0, atol=1e-6)
        assert float((of_rank["of_rollout"] - of_rank["before"]).abs().max()) > 1e-6


@pytest.mark.parametrize("name", ["full@1", "full@2", "lora@1", "lora@2"])
def test_a_checkpoint_restores_every_weight(folder: Path, name: str) -> None:
    assert all(of_rank["restored"] and of_rank["described"] for of_rank in cell(folder, name))


@pytest.mark.parametrize("name", ["full@1", "full@2", "lora@1", "lora@2"])
def test_a_checkpoint_has_the_moving_average_of_what_is_trained(folder: Path, name: str) -> None:
    """As diffusers or peft read it; after one step with a decay of (1 + 1) / (10 + 1)."""
    trained, average = cell(folder, name)[0], folder / f"{name}-checkpoint" / "average"
    files = {"full": "diffusion_pytorch_model.safetensors", "lora": "adapter_model.safetensors"}
    found = load_file(average / files[name[:4]])
    weights = {key.replace(".default.", "."): trained["weights"][key] for key in trained["weights"]}
    first = {key.replace(".default.", "."): trained["first"][key] for key in trained["first"]}
    assert found.keys() == {key for key in weights if name[:4] == "full" or ".lora_" in key}
    for key, value in found.items():
        # `make_engine` changes it once the average has begun.
        began = first[key] - 0.01 if "lora_B" in key else first[key]
        wanted = began + (weights[key] - began) * 9 / 11
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-7)
    assert any((average / one).is_file() for one in ("config.json", "adapter_config.json"))


def test_an_adapter_trains_nothing_else(folder: Path) -> None:
    (lora,), before = cell(folder, "lora@1"), torch.load(folder / "by_hand.pt")["weights"]
    adapter = {name for name in lora["weights"] if ".lora_" in name}
    assert lora["published"] == len(adapter) > 0
    frozen = next(name for name in before if name.endswith("attn.to_q.bias"))
    kept = lora["weights"][f"base_model.model.{frozen.replace('.bias', '.base_layer.bias')}"]
    from tests.fakes.tiny_flow import tiny_sd3

    assert torch.equal(kept, tiny_sd3(0).state_dict()[frozen])
    assert not torch.equal(kept, before[frozen]), "training all weights changes it"


# The columns.


def test_values_are_where_a_language_model_has_them(module: ModuleType) -> None:
    """One place early, as the log-prob of a token comes from the output of the token before it."""
    nested = module.as_verl_has_them(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [3, 1])
    assert [row.tolist() for row in nested.unbind()] == [[0, 0, 1, 2, 0], [3, 4, 0]]


def test_windows_of_one_size_are_required(module: ModuleType) -> None:
    latents = torch.zeros(2, 4, 1, 1, 1)
    nested = torch.nested.as_nested_tensor(
        [torch.tensor([0, 1, 2]), torch.tensor([4, 5, 6])], layout=torch.jagged
    )
    assert module.steps_of(nested, latents).tolist() == [[0, 1, 2], [4, 5, 6]]
    assert module.steps_of(torch.arange(6).view(2, 3), latents).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="2 samples with 4 latents each must have 3 SDE steps each, got 4"):
        module.steps_of(torch.arange(4).view(2, 2), latents)


NAMES = ("states", "pooled")


class Store:
    """Returns the conditions of each key, as nested columns."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        assert partition_id == "train" and select_fields == ["condition_states", "condition_pooled"]
        self.asked.append(keys)
        values = {"condition_states": (2, 3), "condition_pooled": (4,)}
        return {
            name: torch.nested.as_nested_tensor(
                [torch.full(shape, float(key)) for key in keys], layout=torch.jagged
            )
            for name, shape in values.items()
        }


@pytest.fixture
def store(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(module, "tq", made)
    return made


def test_each_row_gets_the_conditions_of_its_holder(module: ModuleType, store: Store) -> None:
    found = module.PromptConditions(NAMES).of(["2", "1", "2"])
    assert found["pooled"].tolist() == [[2.0] * 4, [1.0] * 4, [2.0] * 4]
    assert found["states"].shape == (3, 2, 3) and store.asked == [["1", "2"]]


def test_what_is_known_is_not_fetched_again(module: ModuleType, store: Store) -> None:
    conditions = module.PromptConditions(NAMES)
    for holders in (["1", "2"], ["2", "3"], ["3", "1"]):
        conditions.of(holders)
    assert store.asked == [["1", "2"], ["3"]]


def test_no_more_is_kept_than_may_be(
    module: ModuleType, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * (6 + 4) * 4)
    conditions = module.PromptConditions(NAMES)
    for holders in (["1", "2"], ["3"], ["2", "3"], ["1"]):
        conditions.of(holders)
    assert store.asked == [["1", "2"], ["3"], ["1"]]
    assert conditions.of(["1", "2", "3", "4"])["pooled"].shape == (4, 4), "a batch may be larger"


DECAY, EVERY = 0.25, 2


class Model(torch.nn.Linear):
    """One weight, which is trained, and one that is not."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.bias.requires_grad_(False)
        self.config = SimpleNamespace(save_pretrained=lambda folder: None)

    def train_to(self, value: float) -> None:
        self.weight.data.fill_(value)


def averages(module: ModuleType, folder: Path, resumed_after: int | None) -> list[float]:
    """Return the average after each step to the weights 1, 2, ..., with a resume in between."""
    model, found = Model(), []
    model.train_to(0.0)
    average = module.MovingAverage(model, DECAY, EVERY)
    for step in range(1, 8):
        model.train_to(step)
        average.step()
        average.save(folder, 0, 1)
        kept = module.load_file(folder / "average" / "diffusion_pytorch_model.safetensors")
        assert kept.keys() == {"weight", "bias"}
        found.append(kept["weight"].item())
        if step == resumed_after:
            average = module.MovingAverage(model, DECAY, EVERY)
            average.load(folder, 0, 1)
    return found


def test_the_average_is_the_formula(module: ModuleType, tmp_path: Path) -> None:
    """Every second step, and with a smaller decay at first: 2 / 11, then 0.25."""
    first = 2 * 9 / 11
    second = first * 0.25 + 4 * 0.75
    third = second * 0.25 + 6 * 0.75
    wanted = [0.0, first, first, second, second, third, third]
    assert averages(module, tmp_path, None) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_resumed_average_is_the_one_that_was_left_alone(
    module: ModuleType, tmp_path: Path, step: int
) -> None:
    for name in ("alone", "resumed"):
        (tmp_path / name).mkdir()
    wanted = averages(module, tmp_path / "alone", None)
    assert averages(module, tmp_path / "resumed", step) == wanted


def test_a_checkpoint_without_it_is_refused(module: ModuleType, tmp_path: Path) -> None:
    model = Model()
    average = module.MovingAverage(model, DECAY, EVERY)
    with pytest.raises(CheckpointError, match="has no moving average; leave diffusion.ema_decay as it was"):
        average.load(tmp_path, 0, 1)
    average.save(tmp_path, 0, 1)
    model.bias.requires_grad_(True)
    with pytest.raises(CheckpointError, match="of another model"):
        module.MovingAverage(model, DECAY, EVERY).load(tmp_path, 0, 1)

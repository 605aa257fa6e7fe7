# SPDX-License-Identifier: Apache-2.0
"""What a report shows of what a step has written, each figure with a word on what it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .steps import Figure, Figures

OF_SUMMARY = {
    "status": "",
    "steps": "optimizer steps",
    "groups_trained": "prompts, each with all of its responses",
    "lag_max": "largest age of a sample, in policy versions",
    "reward_first": "mean reward of the first fifth of the steps",
    "reward_last": "mean reward of the last fifth",
    "rollout_corr_kl_max": "largest divergence of a step between the engine's log-probs and the trainer's",
    "wall_s": "seconds, start-up included",
}


def of_environment(found: Any) -> Figures:
    return [Figure(row["subject"], f"{row['verdict']}: {row['detail']}", row["remedy"]) for row in found]


def of_copies(found: Any) -> Figures:
    (row,) = found["sizes"].values()
    to_host, to_device = found["limits"]["to_host_gb_s"], found["limits"]["to_device_gb_s"]
    gather, stage = row["gather_gb_s"]["median"], row["stage_gb_s"]["median"]
    above = "" if found["device"] != "cpu" else "; above 1, as they use more threads than a plain copy"
    return [
        Figure("device", found["device"]),
        Figure("device to host, GB/s", to_host, "one plain copy into pinned memory"),
        Figure("host to device, GB/s", to_device, "one plain copy from pinned memory"),
        Figure("gather, GB/s", gather, "the trainer's weights into shared memory"),
        Figure("gather / device to host", gather / to_host, f"1 is as fast as the plain copy{above}"),
        Figure("stage, GB/s", stage, "from shared memory into the standby copy on the device"),
        Figure("stage / host to device", stage / to_device, f"1 is as fast as the plain copy{above}"),
        Figure("commit, ms", row["commit_s"]["median"] * 1e3, "until the standby copy serves"),
    ]


DELIVERED = {
    "ranks": "processes that hold the weights in shards",
    "megabytes": "of weights in a version",
    "tensors_proved": "served tensors compared with the published ones, over all versions",
    "tensors_different": "published tensors that are not bit by bit the trained ones",
    "gather_s": "seconds, the least of all versions: shards into shared memory",
    "stage_s": "the same: shared memory to the standby copy",
    "commit_s": "the same: until the new version serves",
    "prove_s": "the same: comparison of sampled values",
    "refused": "the error of a load that left a tensor out on purpose",
}


def of_delivery(found: Any) -> Figures:
    return _each(found, DELIVERED)


ENGINE = {
    "model runner": "vLLM's; the second one keeps requests in states",
    "attention": "its backend",
    "executor": "its processes",
    "CUDA graphs": "their kernels read weights by address",
    "versions": "loaded while requests were open",
    "staged": "of them copied to the device before",
    "tensors_proved": "served tensors compared with the published ones, over all versions",
    "start_s": "seconds, with the start of the engine's processes",
    "load_s": "seconds, the least of all versions: load and proof",
    "tokens": "compared with the version that is recorded for them",
    "responses_of_several_versions": "written across a load",
    "wrong": "responses whose tokens are of other versions than recorded",
}


def of_engine(found: Any) -> Figures:
    figures = [Figure("engine", found["engine"]), Figure("ranks", found["ranks"], "share a model")]
    for model, report in found["models"].items():
        shown = {name: len(value) if name == "wrong" else value for name, value in report.items()}
        figures += [replace(one, name=f"{model}, {one.name}") for one in _each(shown, ENGINE)]
    return figures


def of_job(found: Any) -> Figures:
    return _each(found, OF_SUMMARY)


def _each(found: Any, meanings: Mapping[str, str]) -> list[Figure]:
    return [Figure(name, found[name], meaning) for name, meaning in meanings.items() if name in found]


def of_ladder(found: Any) -> Figures:
    differ = "largest difference of a step, relative to the sync trainer's value or to 1"
    return [
        Figure("tolerance", found["tolerance"], "a larger difference is a failure"),
        *(Figure(name, value, differ) for name, value in found["differences"].items()),
    ]


def of_weight_updates(found: Any) -> Figures:
    (ways,) = found["replicas"].values()
    return [figure for way, row in ways.items() if isinstance(row, Mapping) for figure in _of_way(way, row)]


def _of_way(way: str, row: Mapping[str, Any]) -> Iterator[Figure]:
    for part, meaning in (
        ("trainer_stall", "the trainer waits, median"),
        ("generator_stall", "a replica does not generate, median"),
        ("publication", "from the trained weights to their being served, median"),
    ):
        if f"{part}_s" in row:
            yield Figure(f"{way}, {part} ms", row[f"{part}_s"]["median"] * 1e3, meaning)

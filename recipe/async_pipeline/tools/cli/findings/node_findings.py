# SPDX-License-Identifier: Apache-2.0
"""The findings of `async-pipeline doctor --cluster`: what every node lacks, and whether the nodes agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .finding import Finding, as_line

if TYPE_CHECKING:
    from .node_calls import NodeAnswer

COMMAND = ("-m", "recipe.async_pipeline", "doctor", "--json")
TIMEOUT_S = 120.0
"""Seconds for all nodes together. A node that is short of memory or of workers does not answer."""
EVERYWHERE_EQUAL = ("python", "async_pipeline", "verl", "torch", "vllm", "sglang", "ray", "transfer_queue")
"""Subjects whose versions must be the same on all nodes: they exchange pickled objects."""
OF_ONE_MACHINE = ("port",)
"""Subjects that mean nothing here: Ray itself has the ports."""


def findings_of(answer: NodeAnswer) -> list[Finding]:
    """Return what the doctor found on a node, or the reason why it could not run there."""
    if answer.status is None:
        return [
            Finding(
                subject="node",
                verdict="fail",
                detail=answer.stderr,
                remedy="`ray list nodes` and the logs of its raylet say more",
            )
        ]
    try:
        found = [Finding(**row) for row in json.loads(answer.stdout)]
    except (ValueError, TypeError):
        return [_without_package(answer)]
    return [finding for finding in found if finding.subject not in OF_ONE_MACHINE]


def _without_package(answer: NodeAnswer) -> Finding:
    last = (answer.stderr.strip().splitlines() or ["it printed no findings"])[-1]
    return Finding(
        subject="async_pipeline",
        verdict="fail",
        detail=f"{answer.python} cannot run it: {last}",
        remedy="install the same wheel into the environment that runs `ray start` on this node",
    )


def disagreements(of_nodes: dict[str, list[Finding]]) -> list[Finding]:
    """Return a failure for each subject whose version differs between the nodes."""
    found = []
    for subject in EVERYWHERE_EQUAL:
        versions: dict[str, list[str]] = {}
        for node, findings in of_nodes.items():
            for finding in findings:
                # The first two words: a name and its version, without the folder that follows.
                if finding.subject == subject and finding.verdict != "fail":
                    version = finding.detail.partition(" at ")[0].partition(" is imported ")[0]
                    versions.setdefault(version, []).append(node)
        if len(versions) > 1:
            detail = ", ".join(f"{version} on {', '.join(nodes)}" for version, nodes in versions.items())
            found.append(
                Finding(
                    subject=subject,
                    verdict="fail",
                    detail=f"differs between nodes: {detail}",
                    remedy="install the same version on all nodes",
                )
            )
    return found


def examine_cluster(address: str, nodes: int | None = None) -> list[tuple[str, Finding]]:
    """Return the findings of all nodes of a Ray cluster, each with the address of its node.

    Disagreements come last, for the node `all`, among them a number of nodes other than `nodes`. Raises
    ConfigError if no cluster answers at `address`.
    """
    from .node_calls import on_every_node

    return rows_of(on_every_node(address, COMMAND, TIMEOUT_S), nodes)


def rows_of(answers: Sequence[NodeAnswer], nodes: int | None = None) -> list[tuple[str, Finding]]:
    """Return the rows of the report for the answers of all nodes."""
    of_nodes = {answer.node: findings_of(answer) for answer in answers}
    rows = [(node, finding) for node, findings in of_nodes.items() for finding in findings]
    together = disagreements(of_nodes)
    if nodes not in (None, len(of_nodes)):
        together.append(
            Finding(
                subject="nodes",
                verdict="fail",
                detail=f"{len(of_nodes)} have joined, expected {nodes}",
                remedy="wait, or read the output of `ray start` on the others",
            )
        )
    return rows + [("all", finding) for finding in together]


def in_words(rows: Sequence[tuple[str, Finding]]) -> list[str]:
    """Return the report as lines: for each node a count, and every finding that is not ok."""
    lines = []
    for node in dict.fromkeys(node for node, _ in rows):
        findings = [finding for where, finding in rows if where == node]
        bad = [finding for finding in findings if finding.verdict != "ok"]
        if node != "all":
            lines.append(f"node {node}: {len(findings)} checks, {len(bad)} not ok")
        else:
            lines.append("all nodes together:")
        lines += [f"  {as_line(finding)}" for finding in bad]
    return lines

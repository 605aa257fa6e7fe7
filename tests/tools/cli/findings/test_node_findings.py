# SPDX-License-Identifier: Apache-2.0
"""The report on all nodes of a cluster, from the answers of the nodes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.console import EXIT_OK, EXIT_USERS
from recipe.async_pipeline.tools.cli.findings import node_findings
from recipe.async_pipeline.tools.cli.findings.finding import Finding, Verdict

pytest.importorskip("ray")
from recipe.async_pipeline.tools.cli.findings.node_calls import NodeAnswer  # noqa: E402


def finding(subject: str, detail: str, verdict: Verdict = "ok") -> Finding:
    return Finding(
        subject=subject, verdict=verdict, detail=detail, remedy="" if verdict == "ok" else "fix it"
    )


def answer(node: str, *findings: Finding) -> NodeAnswer:
    printed = json.dumps([dataclasses.asdict(one) for one in findings])
    return NodeAnswer(node=node, python="/opt/bin/python", status=0, stdout=printed)


def test_equal_nodes_have_nothing_to_report() -> None:
    same = (finding("python", "3.11"), finding("torch", "torch 2.8.0"))
    rows = node_findings.rows_of([answer("10.0.0.1", *same), answer("10.0.0.2", *same)])
    assert node_findings.in_words(rows) == [
        "node 10.0.0.1: 2 checks, 0 not ok",
        "node 10.0.0.2: 2 checks, 0 not ok",
    ]


def test_ports_belong_to_ray_here() -> None:
    rows = node_findings.rows_of([answer("a", finding("port", "6379 is in use", "warn"))])
    assert rows == []


def test_what_is_missing_on_a_node_is_a_line_below_it() -> None:
    missing = finding("vllm", "no vllm installed", "fail")
    rows = node_findings.rows_of([answer("a", finding("vllm", "vllm 0.28")), answer("b", missing)])
    assert node_findings.in_words(rows) == [
        "node a: 1 checks, 0 not ok",
        "node b: 1 checks, 1 not ok",
        "  fail  vllm             no vllm installed; fix it",
    ]


def test_a_node_without_the_package_says_how_to_install_it() -> None:
    without = NodeAnswer(
        node="b", python="/x/python", status=1, stderr="trace\n/x/python: No module named recipe"
    )
    (found,) = node_findings.findings_of(without)
    assert (found.subject, found.verdict) == ("async_pipeline", "fail")
    assert found.detail == "/x/python cannot run it: /x/python: No module named recipe"
    assert "install the same wheel" in found.remedy


def test_a_node_that_does_not_answer_fails() -> None:
    (found,) = node_findings.findings_of(NodeAnswer(node="b", stderr="no answer within 5 s"))
    assert (found.subject, found.verdict, found.detail) == ("node", "fail", "no answer within 5 s")


def test_other_output_than_findings_fails() -> None:
    (found,) = node_findings.findings_of(NodeAnswer(node="b", python="p", status=0, stdout="[]x"))
    assert found.verdict == "fail" and "it printed no findings" in found.detail


def test_versions_must_agree_and_folders_need_not() -> None:
    rows = node_findings.rows_of(
        [
            answer("a", finding("verl", "0.9.1 at /one/verl"), finding("ray", "ray 2.50.0")),
            answer("b", finding("verl", "0.9.1 at /two/verl"), finding("ray", "ray 2.49.0")),
            answer("c", finding("verl", "0.9.1 is imported from /x, not from /y", "warn")),
            answer("d", finding("ray", "no ray installed", "fail")),
        ]
    )
    (together,) = (one for node, one in rows if node == "all")
    assert (together.subject, together.verdict) == ("ray", "fail")
    assert together.detail == "differs between nodes: ray 2.50.0 on a, ray 2.49.0 on b"
    assert node_findings.in_words(rows)[-2] == "all nodes together:"


@pytest.mark.parametrize(("verdict", "status"), [("warn", EXIT_OK), ("fail", EXIT_USERS)])
def test_the_command_prints_lines_or_json(
    verdict: Verdict, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def examine(address: str, nodes: int | None) -> list[tuple[str, Finding]]:
        asked.append(address)
        return [("a", finding("torch", "none", verdict))]

    monkeypatch.setattr(node_findings, "examine_cluster", examine)
    assert main.main(["doctor", "--cluster"]) == status
    assert capsys.readouterr().out.splitlines()[0] == "node a: 1 checks, 1 not ok"
    assert main.main(["doctor", "--cluster", "h:6379", "--json"]) == status
    assert json.loads(capsys.readouterr().out)[0] | {"detail": ""} == {
        "node": "a",
        "subject": "torch",
        "verdict": verdict,
        "detail": "",
        "remedy": "fix it",
    }
    assert asked == ["auto", "h:6379"]


def test_another_number_of_nodes_fails() -> None:
    same = finding("python", "3.11")
    assert node_findings.rows_of([answer("a", same)], 1) == [("a", same)]
    (_, (node, missing)) = node_findings.rows_of([answer("a", same)], 2)
    assert (node, missing.verdict, missing.detail) == ("all", "fail", "1 have joined, expected 2")

# SPDX-License-Identifier: Apache-2.0
"""The router chooses the least busy replica and keeps the turns of a request together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.verl_bridge.rollout.router import Router, servers_of


def router(*names: str) -> Router:
    made = Router(choose=min)
    made.update({name: name.upper() for name in names})
    return made


def acquired(made: Router, request: str) -> str:
    found = made.acquire(request)
    assert found is not None
    name, handle = found
    assert handle == name.upper()
    return name


def test_the_least_busy_replica_is_chosen() -> None:
    made = router("a", "b")
    assert [acquired(made, f"r{i}") for i in range(4)] == ["a", "b", "a", "b"]
    made.release("b")
    assert acquired(made, "r9") == "b"


def test_later_turns_use_the_replica_of_the_first() -> None:
    made = router("a", "b")
    assert acquired(made, "x") == "a"
    made.release("a")
    assert [acquired(made, "y"), acquired(made, "x")] == ["a", "a"]


def test_an_empty_router_returns_none() -> None:
    assert Router().acquire("x") is None
    made = router("a")
    made.remove("a")
    assert made.acquire("x") is None
    assert made.servers == ()


def test_a_request_moves_when_its_replica_is_removed() -> None:
    made = router("a", "b")
    assert acquired(made, "x") == "a"
    made.remove("a")
    assert acquired(made, "x") == "b"
    made.update({"a": "A", "b": "B"})
    assert acquired(made, "x") == "b", "and stays there"


@given(st.lists(st.integers(0, 30), max_size=60))
def test_open_turns_are_balanced(requests: list[int]) -> None:
    made = router("a", "b", "c")
    counts = dict.fromkeys("abc", 0)
    for number, _ in enumerate(requests):
        counts[acquired(made, f"r{number}")] += 1
    assert max(counts.values()) - min(counts.values()) <= 1
    for name, count in counts.items():
        for _ in range(count):
            made.release(name)
    assert not made._open


def test_only_verls_default_balancer_lets_clients_decide() -> None:
    class GlobalRequestLoadBalancer(SimpleNamespace):
        pass

    known: dict[str, Any] = {"a": 1}
    assert servers_of(GlobalRequestLoadBalancer(_full_determinism=False, _servers=known)) == known
    assert servers_of(GlobalRequestLoadBalancer(_full_determinism=True, _servers=known)) is None
    assert servers_of(SimpleNamespace(_full_determinism=False, _servers=known)) is None

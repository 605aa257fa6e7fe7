# SPDX-License-Identifier: Apache-2.0
"""A log of the pipeline itself has no violation; one that was tampered with has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.lab.event_audit import audit_events
from tests.fakes.trainer import ALL_ROLES, WITH_CRITIC, SimTrainer

Log = list[dict[str, Any]]


def log_of(trainer: SimTrainer) -> Log:
    flow = AsyncTrainingFlow(trainer)
    run_virtual(flow.run())
    return [
        {"t": r.t, "role": r.role, "event": r.event, **({"state": r.state} if r.state else {}), **r.fields}
        for r in flow.log.records
    ]


@pytest.mark.slow
@given(
    max_lag=st.integers(0, 3),
    steps=st.integers(1, 5),
    roles=st.sampled_from([ALL_ROLES, WITH_CRITIC]),
    order=st.sampled_from(["drawn", "finished"]),
    places=st.sampled_from([{}, {"logp": "b"}, {"logp": "b", "ref_logp": "b"}, {"ref_logp": "c"}]),
    save_every=st.integers(0, 2),
    sync_every=st.integers(1, 2),
)
def test_what_the_pipeline_does_is_no_violation(max_lag: int, **settings: Any) -> None:
    # The config refuses what is beyond that.
    settings["sync_every"] = min(settings["sync_every"], 1 if "logp" in settings["places"] else max_lag + 1)
    log = log_of(SimTrainer(max_lag=max_lag, **settings))
    found = audit_events(log)
    assert found.violations == []
    assert found.served[-1][1] == settings["steps"]


def tampered(find: Callable[[dict[str, Any]], bool], **fields: Any) -> Callable[[Log], None]:
    def tamper(log: Log) -> None:
        next(record for record in reversed(log) if find(record)).update(fields)

    return tamper


def without(event: str) -> Callable[[Log], None]:
    def tamper(log: Log) -> None:
        log.remove(
            next(
                record
                for record in log
                if record["event"] == event and record["role"] in ("train", "param_update")
            )
        )

    return tamper


def is_event(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: record["event"] == name


def second_tenant(log: Log) -> None:
    place = next(
        i for i, record in enumerate(log) if record["role"] == "train" and record["event"] == "LEASE"
    )
    log.insert(place + 1, {**log[place], "role": "logp"})


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (tampered(is_event("SERVED"), t=0.0), "time goes back from"),
        (tampered(is_event("SERVED"), version=1), "version 1 is served after version 2"),
        (tampered(is_event("SERVED"), version=9), "version 9 is served, and was never gathered"),
        (tampered(is_event("SERVED"), replicas=0), "version 3 is served by no replica"),
        (
            tampered(is_event("GATHERED"), version=4),
            "version 4 is gathered, and step 3 is the last that was trained",
        ),
        (tampered(is_event("TRAINED"), version=2), "step 2 is trained after step 2"),
        (
            tampered(is_event("TRAINED"), **{"lag/max": 2.0}),
            "step 3 trains on responses with lag 2; 1 is allowed",
        ),
        (
            tampered(lambda r: r["role"] == "train" and r["event"] == "ITEM", state="RUNNING"),
            "ITEM leads from WAITING_INPUT to WAITING_RESOURCE, not RUNNING",
        ),
        (second_tenant, "pool train at "),
        (without("ITEM"), "LEASE in WAITING_INPUT; legal here"),
        (
            lambda log: log.append({"t": 99.0, "role": "train"}),
            "not a record of an event log (KeyError: 'event')",
        ),
        (
            lambda log: log.append({"t": "soon", "role": "train", "event": "ITEM"}),
            "not a record of an event log (ValueError",
        ),
    ],
)
def test_what_was_tampered_with_is_found(tamper: Callable[[Log], None], says: str) -> None:
    log = log_of(SimTrainer(max_lag=1, steps=3))
    assert audit_events(log).violations == []
    tamper(log)
    assert any(says in text for text in audit_events(log).violations), audit_events(log).violations

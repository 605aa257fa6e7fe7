# SPDX-License-Identifier: Apache-2.0
"""One engine in virtual time, without a pool: slots, queue, freezes and failures."""

from __future__ import annotations

import asyncio
import math

import pytest

from recipe.async_pipeline.tools.plan.simulated.draws import ResponseCost
from recipe.async_pipeline.tools.plan.simulated.replica import Replica, SimulatedGroup, SimulatedResponse

ONE_SLOT = (0.0, 1.0)
"""Seconds of a step with no response, and with one."""


def responses(*tokens: int) -> list[SimulatedResponse]:
    async def make() -> list[SimulatedResponse]:
        return SimulatedGroup([ResponseCost(0.0, (n,), (), 0.0, n) for n in tokens]).responses

    return asyncio.run(make())


def test_a_response_without_a_slot_waits_and_then_takes_the_free_one() -> None:
    replica = Replica(0, ONE_SLOT)
    first, second = responses(3, 2)
    replica.begin(0.0, first, 0.0)
    replica.begin(1.0, second, 0.0)
    assert (replica.running, len(replica.queue), replica.next_at(1.0)) == (1, 1, 3.0)
    assert replica.finished(3.0) == [first]
    assert replica.next_at(3.0) == 5.0


def test_reading_and_freezing_delay_every_response() -> None:
    replica = Replica(0, (0.0, 1.0, 1.0))
    (response,) = responses(2)
    replica.begin(0.0, response, 0.5)
    replica.freeze(1.0, 4.0)
    assert replica.next_at(1.0) == pytest.approx(6.5)


def test_a_forgotten_response_frees_its_slot() -> None:
    replica = Replica(0, ONE_SLOT)
    first, second = responses(9, 2)
    replica.begin(0.0, first, 0.0)
    replica.begin(0.0, second, 0.0)
    first.dead = True
    replica.forget(1.0, first)
    assert replica.next_at(1.0) == 3.0


def test_a_failed_replica_returns_what_ran_and_what_waited() -> None:
    replica = Replica(0, ONE_SLOT)
    both = responses(3, 2)
    for response in both:
        replica.begin(0.0, response, 0.0)
    assert replica.fail(1.0) == both
    assert (replica.is_up, replica.running, replica.next_at(1.0)) == (False, 0, math.inf)


def test_a_response_records_the_version_that_wrote_its_first_token() -> None:
    replica = Replica(0, ONE_SLOT)
    replica.version = 4
    (response,) = responses(1)
    replica.begin(0.0, response, 0.0)
    assert response.first == 4


def turns(*tokens: int) -> SimulatedResponse:
    async def make() -> SimulatedResponse:
        waits = (0.0,) * (len(tokens) - 1)
        return SimulatedGroup([ResponseCost(0.0, tokens, waits, 0.0, sum(tokens))]).responses[0]

    return asyncio.run(make())


def finish_turn(replica: Replica, response: SimulatedResponse, now: float) -> None:
    """Finish a turn as the pool of replicas does."""
    assert replica.finished(now) == [response]
    response.written += response.cost.turn_tokens[response.turn]
    response.turn += 1


def test_turns_that_one_version_wrote_are_one_span() -> None:
    replica = Replica(0, ONE_SLOT)
    response = turns(3, 2, 4)
    replica.begin(0.0, response, 0.0)
    finish_turn(replica, response, 3.0)
    replica.begin(3.0, response, 0.0)
    assert response.spans == [(-1, 0)]
    replica.serve(4.0, 7)
    finish_turn(replica, response, 5.0)
    replica.begin(5.0, response, 0.0)
    assert response.spans == [(-1, 0), (7, 4)]


def test_what_a_failed_replica_wrote_of_a_turn_is_lost() -> None:
    failed, other = Replica(0, ONE_SLOT), Replica(1, ONE_SLOT)
    response = turns(3, 4)
    failed.begin(0.0, response, 0.0)
    finish_turn(failed, response, 3.0)
    failed.begin(3.0, response, 0.0)
    failed.serve(5.0, 8)
    assert response.spans == [(-1, 0), (8, 5)]
    failed.fail(6.0)
    other.version = 9
    other.begin(6.0, response, 0.0)
    assert response.spans == [(-1, 0), (9, 3)]

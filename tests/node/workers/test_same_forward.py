"""What clients see of nodes with workers is what they see of one process each: the same tests, two workers a node."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.node.fakes.cluster import Cluster
from tests.node.http.test_forward import (
    nodes,
    test_a_body_of_megabytes_arrives_as_it_was_sent,
    test_a_broken_stream_is_learnt_from_as_a_failure,
    test_a_client_that_goes_away_aborts_the_engine,
    test_a_completion_says_who_ran_it_and_why,
    test_a_stream_whose_engine_dies_ends_with_an_error_event,
    test_a_whole_answer_whose_engine_dies_is_cut,
    test_an_error_of_the_engine_is_its_own,
    test_an_invalid_request_id_is_replaced,
    test_every_method_goes_through,
    test_expect_continue_is_answered_before_the_body,
    test_hostile_headers_never_reach_the_engine,
    test_requests_on_one_connection_follow_each_other,
    test_the_first_chunk_arrives_while_the_engine_holds_the_second,
    test_tokenize_is_routed_too,
    test_transfer_parameters_of_a_client_are_removed,
)
from tests.node.workers.nodes import worked

__all__ = [
    "nodes",
    "test_a_body_of_megabytes_arrives_as_it_was_sent",
    "test_a_broken_stream_is_learnt_from_as_a_failure",
    "test_a_client_that_goes_away_aborts_the_engine",
    "test_a_completion_says_who_ran_it_and_why",
    "test_a_stream_whose_engine_dies_ends_with_an_error_event",
    "test_a_whole_answer_whose_engine_dies_is_cut",
    "test_an_error_of_the_engine_is_its_own",
    "test_an_invalid_request_id_is_replaced",
    "test_every_method_goes_through",
    "test_expect_continue_is_answered_before_the_body",
    "test_hostile_headers_never_reach_the_engine",
    "test_requests_on_one_connection_follow_each_other",
    "test_the_first_chunk_arrives_while_the_engine_holds_the_second",
    "test_tokenize_is_routed_too",
    "test_transfer_parameters_of_a_client_are_removed",
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Cluster]:
    """Two nodes for the whole file."""
    async with worked(2) as running:
        yield running

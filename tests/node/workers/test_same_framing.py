"""The framing of HTTP is the same where workers do it: the same tests, a node with two workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.node.fakes.cluster import Cluster
from tests.node.http.test_forward import nodes
from tests.node.http.test_framing import (
    test_a_client_of_http_1_0_keeps_its_connection_only_when_it_asks,
    test_a_client_that_closes_its_half_is_gone,
    test_a_head_that_never_ends_is_bounded_by_its_bytes,
    test_a_large_body_that_is_refused_is_answered_and_not_read,
    test_a_request_may_come_byte_by_byte,
    test_a_request_that_is_cut_in_its_body_reaches_nobody,
    test_a_stream_for_a_client_of_http_1_0_ends_with_its_connection,
    test_an_expectation_is_answered_where_it_is_known,
    test_an_offer_to_upgrade_is_ignored_with_its_body_whole,
    test_another_expectation_is_refused,
    test_chunks_may_have_extensions_and_trailers_and_neither_goes_on,
    test_chunks_that_are_none_are_refused,
    test_garbage_behind_a_request_does_not_spoil_its_answer,
    test_head_has_the_headers_and_no_body_and_the_connection_goes_on,
    test_heads_are_bounded,
    test_nothing_is_tunnelled,
    test_only_so_many_requests_wait_on_one_connection,
    test_requests_that_come_at_once_are_answered_in_their_order,
    test_what_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_seen,
)
from tests.node.workers.nodes import worked

__all__ = [
    "nodes",
    "test_a_client_of_http_1_0_keeps_its_connection_only_when_it_asks",
    "test_a_client_that_closes_its_half_is_gone",
    "test_a_head_that_never_ends_is_bounded_by_its_bytes",
    "test_a_large_body_that_is_refused_is_answered_and_not_read",
    "test_a_request_may_come_byte_by_byte",
    "test_a_request_that_is_cut_in_its_body_reaches_nobody",
    "test_a_stream_for_a_client_of_http_1_0_ends_with_its_connection",
    "test_an_expectation_is_answered_where_it_is_known",
    "test_an_offer_to_upgrade_is_ignored_with_its_body_whole",
    "test_another_expectation_is_refused",
    "test_chunks_may_have_extensions_and_trailers_and_neither_goes_on",
    "test_chunks_that_are_none_are_refused",
    "test_garbage_behind_a_request_does_not_spoil_its_answer",
    "test_head_has_the_headers_and_no_body_and_the_connection_goes_on",
    "test_heads_are_bounded",
    "test_nothing_is_tunnelled",
    "test_only_so_many_requests_wait_on_one_connection",
    "test_requests_that_come_at_once_are_answered_in_their_order",
    "test_what_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_seen",
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Cluster]:
    """One node for the whole file: nobody else could be preferred to it."""
    async with worked(1) as running:
        yield running

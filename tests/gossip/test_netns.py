"""Real agents on real networks: five hosts on a switch, and two that meet on their second network by IPv6.

Skipped, with the reason, where namespaces are not permitted. The tests of the five are one story, in the order in which
they stand: starting Python five times is most of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.gossip.netns import Lab, NotPermittedError
from tests.waiting import PATIENCE_S

NAMES = [f"h{i}" for i in range(1, 6)]
ALIVE = {name: ["alive"] for name in NAMES}
#: Far beyond what it takes, for a machine whose cores are busy elsewhere.


@contextmanager
def hosts(size: int) -> Iterator[Lab]:
    try:
        made = Lab(size)
    except NotPermittedError as error:
        pytest.skip(f"network namespaces: {error}")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with hosts(len(NAMES)) as made:
        for name in NAMES:
            made.start(name)
        yield made


def test_zeroconf_finds_five_agents_across_hosts(lab: Lab) -> None:
    answers = lab.wait(NAMES, ALIVE, PATIENCE_S)
    for answer in answers.values():
        assert {name: host for name, (_, host, _) in answer["members"].items()} == lab.hosts


def test_a_cut_link_makes_suspects_and_heals(lab: Lab) -> None:
    lab.wait(NAMES, ALIVE, PATIENCE_S)
    others = [name for name in NAMES if name != "h3"]
    lab.cut("h3")
    answers = lab.wait(others, ALIVE | {"h3": ["dead"]}, PATIENCE_S)
    for answer in answers.values():
        about = [state for name, state in answer["seen"] if name == "h3"]
        assert about[-2:] == ["suspect", "dead"], "nobody dies without having been suspected"
        assert not any(state == "dead" for name, state in answer["seen"] if name != "h3")
    lab.wait(["h3"], {name: ["suspect", "dead"] for name in NAMES} | {"h3": ["alive"]}, PATIENCE_S)
    lab.mend("h3")
    lab.wait(NAMES, ALIVE, PATIENCE_S)


def test_a_host_that_moves_to_another_address_is_the_same_node(lab: Lab) -> None:
    lab.wait(NAMES, ALIVE, PATIENCE_S)
    lab.agents["h4"].kill()
    lab.move("h4", "10.77.0.44")
    lab.start("h4", incarnation=2)
    answers = lab.wait(NAMES, ALIVE, PATIENCE_S)
    for answer in answers.values():
        assert answer["members"]["h4"] == ["alive", "10.77.0.44", 2]
        assert len(answer["members"]) == len(NAMES)


def test_hosts_with_two_networks_find_each_other_on_the_second_by_ipv6() -> None:
    names = ["h1", "h2"]
    with hosts(len(names)) as lab:
        for name in names:
            lab.cut(name)  # so that nothing can be heard by IPv4
            lab.start_on_second(name)
        answers = lab.wait(names, {name: ["alive"] for name in names}, PATIENCE_S)
        for answer in answers.values():
            assert {name: host for name, (_, host, _) in answer["members"].items()} == {
                "h1": "fd77::1",
                "h2": "fd77::2",
            }

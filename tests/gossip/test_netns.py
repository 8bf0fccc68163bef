"""Real agents on real networks: five hosts on a switch. Skipped, with the reason, where namespaces are not permitted.

The tests are one story on one network, in the order in which they stand: starting Python five times is most of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gossip.netns import Lab, NotPermittedError

NAMES = [f"h{i}" for i in range(1, 6)]
ALIVE = {name: ["alive"] for name in NAMES}
#: Far beyond what it takes, for a machine whose cores are busy elsewhere.
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    try:
        made = Lab(len(NAMES))
    except NotPermittedError as error:
        pytest.skip(f"network namespaces: {error}")
    try:
        for name in NAMES:
            made.start(name)
        yield made
    finally:
        made.close()


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

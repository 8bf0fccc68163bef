"""What a soak tells people."""

from soak_run.summary import summary


def test_the_requests_are_told_and_what_memory_did_and_no_other_figure() -> None:
    report = {
        "minutes": 30.0,
        "requests": 3534,
        "cut": 12,
        "pulls": 356,
        "pulled_blocks": 900,
        "differ": 1,
        "failures": {"503": 2, "timeout": 1},
        "second_and_last_third": {"a.node_mib": (52.2, 53.4), "a.node_files": (50.0, 50.0)},
    }
    requests, *memory = summary(report)
    assert "3534 requests in 30 minutes, 12 cut by their clients, 356 with pulls (900 blocks), 3 failed" in requests
    assert memory == ["a.node_mib: 52 MiB, at the end 53 MiB"]

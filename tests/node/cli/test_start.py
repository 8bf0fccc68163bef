"""`grapevine start`: settings in, exit status out."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from node.errors import PortTakenError
from node.settings import Settings


class FakeApp:
    """In place of `node.app`."""

    def __init__(self, outcome: int | BaseException) -> None:
        self.outcome = outcome
        self.settings: Settings | None = None
        self.as_json = False

    def run(self, settings: Settings, *, as_json: bool = False) -> int:
        self.settings, self.as_json = settings, as_json
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(0, 0), (1, 1), (PortTakenError("port 8100 is taken: choose another with --port"), 2), (KeyboardInterrupt(), 130)],
)
def test_start_hands_the_settings_to_the_node_and_exits_with_its_status(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException, status: int
) -> None:
    app = FakeApp(outcome)
    monkeypatch.setitem(sys.modules, "node.app", app)  # type: ignore[arg-type]
    result = run(
        "start", "--port", "9001", "--join", "a:1", "b:2", "--", "--max-model-len", "99", env={"GRAPEVINE_PROT": "1"}
    )
    assert result.exit_code == status
    assert app.settings is not None
    assert (app.settings.port, app.settings.join) == (9001, ("a:1", "b:2"))
    assert app.settings.engine_args == ("--max-model-len", "99")
    assert "GRAPEVINE_PROT is not known and is ignored: did you mean GRAPEVINE_PORT?" in result.output
    if isinstance(outcome, PortTakenError):
        assert "choose another with --port" in result.output


def test_a_wrong_setting_has_exit_status_2(run: Callable[..., Result]) -> None:
    result = run("start", "--name", "a b")
    assert result.exit_code == 2
    assert "letters" in result.output


def test_start_says_it_in_json_where_that_is_wanted(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FakeApp(0)
    monkeypatch.setitem(sys.modules, "node.app", app)  # type: ignore[arg-type]
    assert run("start", "--json").exit_code == 0 and app.as_json
    assert run("start", env={"GRAPEVINE_AS_JSON": "1"}).exit_code == 0 and not app.as_json

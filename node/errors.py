"""Errors of the node, split by whose fault they are.

- `LocalError`: what the user or the caller gave us is wrong; nothing changed, the message says what to do.
- `RemoteError`: what a peer, an engine or a client sent or did is wrong; our own state is as it was.
- `InvariantError`: a bug of ours; carries the story that led to it.
"""

from __future__ import annotations


class GrapevineError(Exception):
    """Base of all errors raised by `node`."""


class LocalError(GrapevineError):
    """The caller or the user gave something that cannot work."""


class SettingsError(LocalError):
    """A flag, environment variable or key of the configuration file is wrong. The message says what to do."""


class PortTakenError(SettingsError):
    """A port or socket that the node must listen on is used by somebody else."""


class ModelStoreError(LocalError):
    """The default model could not be fetched, checked or converted. The message says what to do."""


class RemoteError(GrapevineError):
    """A peer or a client sent something that breaks the contract."""


class BadRequest(RemoteError):
    """A client's request cannot be understood: answered with 400 and this message."""


class EngineError(RemoteError):
    """The engine answered wrongly, too late or not at all."""


class InvariantError(GrapevineError):
    """A rule that the code promises does not hold: a bug. Carries a bounded story of what led to it."""

    def __init__(self, rule: str, story: tuple[str, ...] = ()) -> None:
        super().__init__("\n  ".join((rule, *story)))
        self.rule = rule
        self.story = story

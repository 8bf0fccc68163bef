"""Errors by whose fault they are.

- `LocalError`: our caller or our configuration (too little shared memory, a pool that another process owns).
- `RemoteError`: the other side sent what it must not send. Decoders raise this kind and nothing else.
- `InvariantError`: a bug of ours, found by `validate()`.

None of them leaves a pool half changed: the operation that raised did not happen.
"""


class KvError(Exception):
    """Base of every error that this package raises on purpose."""


class LocalError(KvError):
    """The caller's or the configuration's fault; the message says what to do about it."""


class PoolSizeError(LocalError):
    """The pool's capacity does not fit: too small for its blocks, or too large for the file system."""


class PoolOwnedError(LocalError):
    """A live process already owns the pool file."""


class RemoteError(KvError):
    """The other side of a connection broke the protocol; close the connection."""


class InvariantError(KvError):
    """Our own books disagree: a bug."""

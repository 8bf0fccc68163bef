"""The file of clients: one line for each key, read by the node, written by people and by `grapevine clients`.

    # name   key                      what it may use at one node
    chat     sha256:9f86d081...       max-running=32 requests-per-minute=600 tokens-per-minute=200000
    batch    a-key-in-clear-text      max-running=4

Several lines may have one name: that is how a key is replaced. Limits stand on one of them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from node.addresses import MAX_NAME, NAME_PATTERN
from node.clients.client import Limits
from node.errors import SettingsError

MAX_BYTES = 1024 * 1024
MAX_CLIENTS = 1000
#: Keys of one client.
MAX_KEYS = 8
#: Characters of a key in clear text: shorter ones can be guessed.
MIN_KEY, MAX_KEY = 16, 256
MAX_LIMIT = 10**12
HASHED = "sha256:"
#: What begins the names of keys that are given with --api-key.
RESERVED = "api-key-"

#: How limits are called in the file and on the command line.
LIMITS = {
    "max-running": "running",
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(rf"[!-~]{{{MIN_KEY},{MAX_KEY}}}")
_NUMBER = re.compile(r"[1-9][0-9]{0,12}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. ``digest``: SHA-256 of the key."""

    name: str
    digest: bytes
    limits: Limits


def digest_of(key: str) -> bytes:
    """Return what a key is known by. Keys are long and random: nothing slower is needed."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read(path: Path) -> list[Entry]:
    """Read the file. :raises SettingsError: it cannot be read, or a line is wrong; the message says which."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise SettingsError(f"--clients-file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"--clients-file {path} is no text in UTF-8") from error
    if len(data) > MAX_BYTES:
        raise SettingsError(f"--clients-file {path} has more than {MAX_BYTES} bytes")
    return parse(text.splitlines(), str(path))


def parse(lines: Iterable[str], where: str) -> list[Entry]:
    """Read lines. :raises SettingsError: one is wrong; keys are not repeated in the message."""
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            entries.append(_entry(words))
        except SettingsError as error:
            raise SettingsError(f"{where}, line {number}: {error}") from None
    _check(entries, where)
    return entries


def _entry(words: list[str]) -> Entry:
    name = words[0]
    if not NAME_PATTERN.fullmatch(name):
        raise SettingsError(f"a name has 1 to {MAX_NAME} letters, digits, dots, underscores or dashes")
    if name.startswith(RESERVED):
        raise SettingsError(f"names that begin with {RESERVED} are those of --api-key: choose another one")
    if len(words) < 2:
        raise SettingsError(f"{name} has no key")
    return Entry(name, _digest(words[1]), _limits(words[2:]))


def _digest(key: str) -> bytes:
    if key.startswith(HASHED):
        if not _DIGEST.fullmatch(key.removeprefix(HASHED)):
            raise SettingsError(f"after {HASHED} come 64 hexadecimal digits")
        return bytes.fromhex(key.removeprefix(HASHED))
    if not _KEY.fullmatch(key):
        raise SettingsError(f"a key has {MIN_KEY} to {MAX_KEY} visible ASCII characters")
    return digest_of(key)


def _limits(words: list[str]) -> Limits:
    given: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in LIMITS or LIMITS[name] in given:
            known = ", ".join(f"{known}=NUMBER" for known in LIMITS)
            raise SettingsError(f"{name[:40]!r} is no limit, or there twice: use {known}")
        if not _NUMBER.fullmatch(value) or int(value) > MAX_LIMIT:
            raise SettingsError(f"{name} must be a whole number from 1 to {MAX_LIMIT}")
        given[LIMITS[name]] = int(value)
    return Limits(**given)


def _check(entries: list[Entry], where: str) -> None:
    names: dict[str, list[Entry]] = {}
    for entry in entries:
        names.setdefault(entry.name, []).append(entry)
    if len(names) > MAX_CLIENTS:
        raise SettingsError(f"{where}: at most {MAX_CLIENTS} clients")
    for name, own in names.items():
        if len(own) > MAX_KEYS:
            raise SettingsError(f"{where}: {name} has more than {MAX_KEYS} keys")
        if len({entry.limits for entry in own if entry.limits != Limits()}) > 1:
            raise SettingsError(f"{where}: {name} has different limits on its lines: give them on one")
    if len({entry.digest for entry in entries}) < len(entries):
        raise SettingsError(f"{where}: the same key stands on two lines")


def line_of(entry: Entry) -> str:
    """Write a line."""
    limits = [f"{name}={value}" for name, key in LIMITS.items() if (value := getattr(entry.limits, key))]
    return " ".join([entry.name, HASHED + entry.digest.hex(), *limits])


def write(path: Path, lines: Iterable[str]) -> None:
    """Replace the file at once, so that nobody reads half of it. :raises SettingsError: it cannot be written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
        aside.replace(path)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error

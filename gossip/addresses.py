"""Addresses to dial again and again: seeds, and where the dead used to live.

Rules
1. A seed is dialled while nobody whom we know at it, or whom it turned out to be, is up. For ever, with backoff.
2. The address of a dead member is dialled too, also after the member itself is forgotten: that is how a healed
   partition, or a node that was cut off and has dropped everybody, finds back.
3. The book is bounded. When it is full the oldest dead address goes first, then the oldest seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gossip.identity import Address


@dataclass(slots=True)
class Contact:
    """One address. `name`: who answered there or lived there; `next_at`: not dialled before, in monotonic seconds."""

    address: Address
    is_seed: bool
    name: str | None
    next_at: float
    backoff_s: float
    dialling: bool = False


class AddressBook:
    """All contacts. `settled(contact)` says whether there is no need to dial one."""

    def __init__(self, most: int, min_s: float, max_s: float, rng: random.Random) -> None:
        self._most = most
        self._min_s = min_s
        self._max_s = max_s
        self._rng = rng
        self._contacts: dict[Address, Contact] = {}

    def __len__(self) -> int:
        return len(self._contacts)

    def get(self, address: Address) -> Contact | None:
        """Give the entry of an address."""
        return self._contacts.get(address)

    def add_seed(self, address: Address, now: float) -> None:
        """Remember a seed; it is due at once."""
        known = self._contacts.get(address)
        if known is not None:
            known.is_seed, known.next_at = True, min(known.next_at, now)
            return
        self._enter(Contact(address, True, None, now, self._min_s))

    def remove_seed(self, address: Address) -> None:
        """Forget a seed, unless a member lived there: then it is remembered like that of any dead member."""
        known = self._contacts.get(address)
        if known is None:
            return
        known.is_seed = False
        if known.name is None:
            del self._contacts[address]

    def add_dead(self, address: Address, name: str, now: float) -> None:
        """Remember where a dead member lived; due after the first pause."""
        known = self._contacts.get(address)
        if known is None:
            self._enter(Contact(address, False, name, now + self._min_s, self._min_s))
        else:
            known.name, known.backoff_s, known.next_at = name, self._min_s, now + self._min_s

    def due(self, now: float, most: int, settled: Callable[[Contact], bool]) -> list[Contact]:
        """Give up to `most` contacts to dial now: all seeds that are due, but only one of the dead."""
        self._drop_settled(settled)
        waiting = [c for c in self._contacts.values() if not c.dialling and c.next_at <= now and not settled(c)]
        waiting.sort(key=lambda c: c.next_at)
        dead = [c for c in waiting if not c.is_seed][:1]
        return ([c for c in waiting if c.is_seed] + dead)[:most]

    def dialling(self, contact: Contact, now: float) -> None:
        """Note that a dial of it began; the next one waits longer, with jitter of a quarter."""
        contact.dialling = True
        contact.next_at = now + contact.backoff_s * self._rng.uniform(0.75, 1.25)
        contact.backoff_s = min(self._max_s, contact.backoff_s * 2)

    def answered(self, address: Address, name: str | None) -> None:
        """Note the end of a dial: by whom it was answered, if at all."""
        contact = self._contacts.get(address)
        if contact is None:
            return
        contact.dialling = False
        if name is not None:
            contact.name = name
            contact.backoff_s = self._min_s

    def _drop_settled(self, settled: Callable[[Contact], bool]) -> None:
        for contact in [c for c in self._contacts.values() if not c.is_seed and not c.dialling and settled(c)]:
            del self._contacts[contact.address]

    def _enter(self, contact: Contact) -> None:
        if len(self._contacts) >= self._most:
            victims = [c for c in self._contacts.values() if not c.is_seed] or list(self._contacts.values())
            del self._contacts[victims[0].address]
        self._contacts[contact.address] = contact

"""Tokens of the emulated engine: text to ids and back, block hashes, and what comes next.

Rules
1. Tokenizing loses nothing: the pieces joined are the text. A piece is a blank and up to four other characters, or up
   to four characters that are no blank. The id of an ASCII piece is the piece itself, so any engine turns it back into
   text; other pieces are known to the engines that have seen them.
2. Every emitted token begins with a blank, so the tokens of `prompt + answer` are those of the prompt followed by
   those of the answer, whether they come back as text or as ids.
3. The next token is a function of all tokens before it. So a prompt with the first k tokens of its answer goes on
   exactly as the answer did: whoever carries a stream to another engine can be checked.
4. Block hashes are chained as vLLM's are: H(hash before, tokens of this block), 32 bytes, seeded with what separates
   caches.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

_PIECE = re.compile(r" [^ ]{0,4}|[^ ]{1,4}", re.DOTALL)

#: Tokens that answers are made of, the first ids.
WORDS = 4096
#: Ends an answer; never shown.
END = WORDS
#: One of so many tokens ends the answer: short and long answers, about this long in the mean.
END_ONE_IN = 128
#: Ids lie below: vLLM refuses ids beyond its vocabulary.
VOCABULARY = 1 << 31
#: ASCII pieces lie from here on: 7 bits for each of four characters, one for the blank before them.
PLAIN = 1 << 30
_BLANK = 1 << 28
#: Other pieces of prompts remembered, so that their ids can be turned back into text.
MAX_PIECES = 1 << 18

_CONSONANTS, _VOWELS = "bdfgklmnprstvwxz", "aeio"


def _word(token: int) -> str:
    """The text of an answer token: a blank and four letters, different for each id."""
    letters = []
    for alphabet in (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS):
        token, place = divmod(token, len(alphabet))
        letters.append(alphabet[place])
    return " " + "".join(letters)


class Tokenizer:
    """Text to ids and back."""

    def __init__(self) -> None:
        self._words = [_word(token) for token in range(WORDS)]
        self._known = {word: token for token, word in enumerate(self._words)}
        self._pieces: OrderedDict[int, str] = OrderedDict()

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        known = self._known
        return [known[piece] if piece in known else self._learn(piece) for piece in _PIECE.findall(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids; ids of pieces that were never seen, or long ago, are shown as a mark."""
        return "".join(self.piece(token) for token in tokens)

    def piece(self, token: int) -> str:
        """The text of one id."""
        if 0 <= token < WORDS:
            return self._words[token]
        if PLAIN <= token < PLAIN + 2 * _BLANK:
            return _plain_piece(token - PLAIN)
        return "" if token == END else self._pieces.get(token, "\N{REPLACEMENT CHARACTER}")

    def _learn(self, piece: str) -> int:
        if piece.isascii() and "\0" not in piece:
            return PLAIN + _plain_id(piece)
        digest = xxh3_64_intdigest(piece.encode("utf-8", "surrogatepass"))
        token = END + 1 + digest % (PLAIN - END - 1)
        self._pieces[token] = piece
        if len(self._pieces) > MAX_PIECES:
            self._pieces.popitem(last=False)
        return token


def _plain_id(piece: str) -> int:
    number = _BLANK if piece.startswith(" ") else 0
    for place, letter in enumerate(piece.removeprefix(" ")):
        number |= ord(letter) << (7 * place)
    return number


def _plain_piece(number: int) -> str:
    letters = (chr(number >> shift & 0x7F) for shift in (0, 7, 14, 21))
    return (" " if number & _BLANK else "") + "".join(letters).rstrip("\0")


def pack(tokens: Sequence[int]) -> bytes:
    """Ids as 4 little-endian bytes each."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def answer(prompt: bytes, *, salt: str = "", ends: bool = True, least: int = 0) -> Iterator[int]:
    """The tokens that follow a packed prompt, without end unless `ends`, and then up to `END`.

    `least`: tokens before which it does not end. `salt`: what makes one answer differ from another to the same prompt
    (`seed`, the number of a choice). It decides the first token alone: what follows is a function of the tokens before
    it, so that every answer can be gone on with from its ids.
    """
    state = xxh3_64(prompt)
    first = xxh3_64_intdigest(salt.encode()) if salt else 0
    for count in itertools.count():
        digest = state.intdigest() if count or not salt else state.intdigest() ^ first
        if ends and count >= least and (digest >> 32) % END_ONE_IN == 0:
            yield END
            return
        token = digest % WORDS
        yield token
        state.update(token.to_bytes(4, "little"))


def block_hashes(packed: bytes, block_size: int, seed: bytes = b"") -> list[bytes]:
    """The chained 32-byte hashes of the full blocks of packed tokens."""
    size = block_size * 4
    last = hashlib.sha256(seed).digest()
    hashes = []
    for start in range(0, len(packed) - size + 1, size):
        last = hashlib.sha256(last + packed[start : start + size]).digest()
        hashes.append(last)
    return hashes

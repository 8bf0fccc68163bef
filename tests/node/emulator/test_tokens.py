"""Tokens: lossless, stable at the seam, and an answer that its own beginning continues."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from node.emulator.tokens import END, VOCABULARY, WORDS, Tokenizer, answer, block_hashes, pack

TEXT = st.text(max_size=200)


@given(TEXT)
def test_the_pieces_joined_are_the_text(text: str) -> None:
    tokenizer = Tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(TEXT, st.integers(0, 30))
def test_a_prompt_with_the_beginning_of_its_answer_goes_on_as_the_answer_did(text: str, cut: int) -> None:
    tokenizer = Tokenizer()
    prompt = tokenizer.encode(text)
    whole = list(islice(answer(pack(prompt), ends=False), 40))
    as_ids = prompt + whole[:cut]
    as_text = tokenizer.encode(text + tokenizer.decode(whole[:cut]))
    assert as_text == as_ids
    assert list(islice(answer(pack(as_ids), ends=False), 40 - cut)) == whole[cut:]


def test_the_checker_bites_when_a_token_was_lost_or_doubled() -> None:
    prompt = Tokenizer().encode("Once upon a time")
    whole = list(islice(answer(pack(prompt), ends=False), 20))
    for broken in (prompt + whole[:4], prompt + whole[:5] + whole[4:5]):
        assert list(islice(answer(pack(broken), ends=False), 15)) != whole[5:]


def test_answers_end_by_themselves_and_choices_and_prompts_differ() -> None:
    lengths = [len(list(answer(pack([i])))) for i in range(300)]
    assert 60 < sum(lengths) / 300 < 260 and min(lengths) < 20
    one, two = (list(islice(answer(pack([1, 2, 3]), salt=salt, ends=False), 8)) for salt in ("", "1"))
    assert one != two
    assert all(0 <= token < WORDS for token in one)
    assert list(answer(pack([7])))[-1] == END


def test_words_are_all_different_and_each_is_one_token() -> None:
    tokenizer = Tokenizer()
    assert tokenizer.encode(tokenizer.decode(range(WORDS))) == list(range(WORDS))


def test_block_hashes_are_chained_and_seeded() -> None:
    tokens = list(range(70))
    hashes = block_hashes(pack(tokens), 16)
    assert len(hashes) == 4 and len(set(hashes)) == 4
    assert block_hashes(pack(tokens[:64]), 16) == hashes
    changed = block_hashes(pack([9, *tokens[1:]]), 16)
    assert not set(changed) & set(hashes)
    assert block_hashes(pack(tokens), 16, b"other model")[0] != hashes[0]


@given(st.text(st.characters(codec="ascii"), max_size=40))
def test_ascii_text_is_known_to_an_engine_that_never_saw_it(text: str) -> None:
    tokens = Tokenizer().encode(text)
    assert all(0 <= token < VOCABULARY for token in tokens)
    if "\0" not in text:
        assert Tokenizer().decode(tokens) == text

"""A completion's growing text: whole characters only, and stop strings wherever they fall."""

import hypothesis.strategies as st
import pytest
from checkpoints import TINY_QWEN3
from hypothesis import given, settings

from nanovllm import SamplingParams
from nanovllm.engine.request import Detokenizer, Request
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.hf import load_tokenizer

TOKENIZER = load_tokenizer(str(TINY_QWEN3))
HALF = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
IM_START, IM_END = 2046, 2047


def byte_ids(data: bytes) -> list[int]:
    """One token per byte: the tokenizer is byte-level, and knows each byte by itself."""
    by_name = TOKENIZER.get_vocab()
    # The printable names of bytes, as byte-level BPE assigns them.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [by_name[names[b]] for b in data]


def texts_of(ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """The text after each token."""
    detokenizer = Detokenizer(TOKENIZER, stop)
    texts = []
    for token_id in ids:
        detokenizer.append(token_id)
        texts.append(detokenizer.text)
    return texts


def stops_at(ids: list[int], *stop: str) -> tuple[int, str] | None:
    """(number of tokens, text) when a stop string is found."""
    detokenizer = Detokenizer(TOKENIZER, stop)
    for count, token_id in enumerate(ids, start=1):
        if detokenizer.append(token_id):
            return count, detokenizer.text
    return None


# --- whole characters -----------------------------------------------------------------------------


@pytest.mark.parametrize("character", ["é", "€", "😀", "👩‍👩‍👧", "नि", "\U0010ffff"])
def test_a_character_split_over_tokens_appears_when_it_is_whole(character: str) -> None:
    """2, 3 and 4 bytes, one token each; and sequences of several code points, one by one."""
    ids = byte_ids(f"a{character}b".encode())
    assert TOKENIZER.decode(ids) == f"a{character}b"
    texts = texts_of(ids)
    assert texts[0] == "a" and texts[-1] == f"a{character}b"
    assert all(HALF not in text and f"a{character}b".startswith(text) for text in texts)
    assert len(set(texts)) == len(character) + 2, "each code point as soon as it is whole"


def test_text_before_an_unfinished_character_in_the_same_token_is_not_held_back() -> None:
    """A token may end a word and begin a character."""

    class Tokenizer:
        """Ids are indices of byte strings."""

        pieces = (b"to be \xe2", b"\x82", b"\xac!", b" or\xf0\x9f")

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    detokenizer = Detokenizer(Tokenizer(), ())
    texts = [(detokenizer.append(i), detokenizer.text)[1] for i in range(4)]
    assert texts == ["to be ", "to be ", "to be €!", "to be €! or"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xff", [""]),
        (b"a\xffb", ["a", "a", f"a{HALF}b"]),
        (b"\xe2\x82x", ["", "", f"{HALF}x"]),
        (b"\x80\x80x", ["", "", f"{HALF}{HALF}x"]),
        (b"\xf0\x9f\xe2\x82\xac", ["", "", "", "", f"{HALF}€"]),
        (HALF.encode() + b".", ["", "", "", f"{HALF}."]),
    ],
)
def test_bytes_that_are_no_character(data: bytes, expected: list[str]) -> None:
    """They are shown once it is certain that they stay what they are; so is a real U+FFFD."""
    ids = byte_ids(data)
    assert texts_of(ids) == expected
    assert TOKENIZER.decode(ids).startswith(expected[-1])


def test_special_tokens_have_no_text_even_inside_a_character() -> None:
    """The tokenizer leaves them out before it joins the bytes."""
    e, euro, sign = byte_ids("€".encode())
    ids = [IM_START, *byte_ids(b"a"), e, IM_END, euro, IM_START, IM_START, sign, IM_END]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a€"
    assert texts_of(ids) == ["", "a", "a", "a", "a", "a", "a", "a€", "a€"]


class Counting:
    """The tokenizer, and how many ids it decoded in each call."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded.append(len(ids))
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


def test_a_long_row_of_special_tokens_costs_no_more_than_a_short_one() -> None:
    """With ignore_eos a model may emit nothing else: what is decoded must not grow."""
    tokenizer = Counting()
    detokenizer = Detokenizer(tokenizer, ())
    for token_id in [*byte_ids(b"ab"), *[IM_END] * 500, *byte_ids(b"cd")]:
        detokenizer.append(token_id)
    assert detokenizer.text == "abcd" and max(tokenizer.decoded) <= 3


ANY_ID = st.one_of(
    st.integers(0, len(TOKENIZER) - 1),
    st.sampled_from([IM_START, IM_END]),
    st.sampled_from(byte_ids("é€😀".encode() + b"\xff\xc0 a")),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(ANY_ID, max_size=30))
def test_after_each_token_the_text_is_the_tokenizers_without_an_open_end(ids: list[int]) -> None:
    """For any ids: the tokenizer's own decoding of all so far, less what may be half a character.
    Nothing shown is ever taken back."""
    shown = ""
    for count, text in enumerate(texts_of(ids), start=1):
        assert text == TOKENIZER.decode(ids[:count], skip_special_tokens=True).rstrip(HALF)
        assert text.startswith(shown)
        shown = text


BYTE = st.sampled_from(byte_ids("é€😀".encode() + b"\xff\xc0\x80a"))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.one_of(BYTE, ANY_ID), min_size=60, max_size=120), st.integers(0, 60))
def test_long_rows_of_bytes_that_are_no_character(ids: list[int], num_bad: int) -> None:
    """A part of them is shown before it is over; nothing is ever taken back, or shown otherwise
    than the tokenizer does in the end."""
    ids = [*ids[:30], *byte_ids(b"\x80" * num_bad), *ids[30:]]
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    shown = ""
    for count, text in enumerate(texts_of(ids), start=1):
        assert text.startswith(shown) and whole.startswith(text)
        assert text.startswith(TOKENIZER.decode(ids[:count], skip_special_tokens=True).rstrip(HALF))
        shown = text


def test_a_long_row_of_such_bytes_costs_no_more_than_a_short_one() -> None:
    tokenizer = Counting()
    detokenizer = Detokenizer(tokenizer, ())
    for token_id in byte_ids(b"\xff" * 500 + "€".encode()):
        detokenizer.append(token_id)
    assert detokenizer.text == HALF * 500 + "€" and max(tokenizer.decoded) <= 34


# --- stop strings ---------------------------------------------------------------------------------

WORDS = TOKENIZER.encode("To be, or not to be")


def test_a_stop_string_is_cut_from_the_text() -> None:
    assert [TOKENIZER.decode([i]) for i in WORDS] == ["To", " be", ",", " or", " not", " to", " be"]
    assert stops_at(WORDS, " not") == (5, "To be, or")
    assert stops_at(WORDS, "To") == (1, "")
    assert stops_at(WORDS, "To bee", "Hamlet", "or nottt") is None


@pytest.mark.parametrize(
    ("stop", "found"),
    [("e, o", (4, "To b")), ("o be, or not t", (6, "T")), (", or not to be", (7, "To be"))],
)
def test_a_stop_string_is_found_across_token_boundaries(stop: str, found: tuple[int, str]) -> None:
    """Beginning and ending inside tokens, over two to seven of them."""
    assert stops_at(WORDS, stop) == found


def test_the_first_of_several_stop_strings_cuts() -> None:
    """First in the text, not in the list; also when both come with the same token."""
    assert stops_at(WORDS, " to", ",") == (3, "To be")
    assert stops_at(WORDS, "ot", "no") == (5, "To be, or ")
    assert stops_at(WORDS, "r n", "or not") == (5, "To be, ")


def test_a_stop_string_of_split_characters() -> None:
    """Found when its last byte is there, in the bytes of several tokens."""
    ids = byte_ids("ab€😀c".encode())
    assert stops_at(ids, "€😀") == (9, "ab")
    assert stops_at(ids, "😀") == (9, "ab€")
    assert stops_at(ids, "b€") == (5, "a")


def test_a_stop_string_before_half_a_character_is_found_at_once() -> None:
    assert stops_at(byte_ids(b"stop\xe2"), "op") == (4, "st")


def test_what_came_before_min_tokens_never_stops() -> None:
    """A stop string that was complete too early is not found later either; one that is completed
    later is, even if it began earlier."""
    detokenizer = Detokenizer(TOKENIZER, ("be", ", or"))
    found = [detokenizer.append(id_, may_stop=i >= 3) for i, id_ in enumerate(WORDS[:4])]
    assert found == [False, False, False, True] and detokenizer.text == "To be"


def test_settled_text_leaves_out_what_may_begin_a_stop_string() -> None:
    """And nothing else: the text of other requests is not delayed."""
    detokenizer = Detokenizer(TOKENIZER, (" be, and", "not to"))
    settled = []
    for token_id in WORDS[:5]:
        detokenizer.append(token_id)
        settled.append(detokenizer.settled_text())
    assert settled == ["To", "To", "To", "To be, or", "To be, or "]


STOP_STRING = st.text("abc€ ", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("abc€ ", max_size=20), st.lists(STOP_STRING, min_size=1, max_size=3))
def test_any_stop_strings_in_any_text(text: str, stop: list[str]) -> None:
    """Byte by byte: found with the byte that completes one, cut before the first; and what is
    settled before is never cut by it."""
    detokenizer = Detokenizer(TOKENIZER, tuple(stop))
    data, settled = text.encode(), ""
    for count, token_id in enumerate(byte_ids(data), start=1):
        so_far = data[:count].decode(errors="ignore")
        starts = [so_far.find(s) for s in stop if s in so_far]
        assert detokenizer.append(token_id) == bool(starts)
        assert detokenizer.text == (so_far[: min(starts)] if starts else so_far)
        assert detokenizer.text.startswith(settled)
        if starts:
            return
        settled = detokenizer.settled_text()


# --- the request ----------------------------------------------------------------------------------


def test_text_is_decoded_once_where_nobody_watches() -> None:
    """Most requests neither stream nor have stop strings: no work per token for their text."""
    calls: list[int] = []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            calls.append(len(ids))
            return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)

    seq = Sequence([1, 2], SamplingParams(max_tokens=7))
    request = Request(seq, Counting())
    for token_id in WORDS:
        seq.append_token(token_id)
        assert not request.accept(token_id, None)
    assert calls == []
    assert request.text() == "To be, or not to be" and calls == [7]


def test_an_increment_is_given_out_once() -> None:
    seq = Sequence([1, 2], SamplingParams(max_tokens=7))
    request = Request(seq, TOKENIZER, index=3, news=[])
    assert request.increment() is None
    for token_id in WORDS[:2]:
        seq.append_token(token_id)
        request.accept(token_id, None)
    assert request.increment() == {
        "index": 3,
        "request_id": seq.seq_id,
        "text": "To be",
        "token_ids": WORDS[:2],
        "finish_reason": None,
    }
    assert request.increment() is None

"""Prefix reuse: keys, the rules of a hit, and what a lookup finds after known runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.model.layout import NULL_PAGE
from dsv41.runner.block_table import admit
from dsv41.runner.pages import PagePool
from dsv41.runner.prefix import Hit, Mode, PrefixCache, bounded_hit, extend_keys, page_keys

TOKENS = st.lists(st.integers(0, 3), max_size=24)


@given(TOKENS, st.integers(1, 5), st.binary(max_size=9))
def test_keys_grow_with_the_tokens(tokens: list[int], page_tokens: int, salt: bytes) -> None:
    keys: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_keys(keys, tokens[:end], page_tokens, salt)
        assert len(keys) == end // page_tokens
        assert keys == page_keys(tokens[:end], page_tokens, salt)


@given(TOKENS, TOKENS)
def test_keys_are_equal_exactly_as_far_as_the_tokens(first: list[int], second: list[int]) -> None:
    pairs = list(zip(page_keys(first, 2), page_keys(second, 2), strict=False))
    for number, (one, other) in enumerate(pairs, 1):
        assert (one == other) == (first[: 2 * number] == second[: 2 * number])


def test_any_earlier_token_and_the_salt_change_every_later_key() -> None:
    tokens = list(range(12))
    keys = page_keys(tokens, 4)
    for position in range(12):
        changed = page_keys([*tokens[:position], 99, *tokens[position + 1 :]], 4)
        assert [a == b for a, b in zip(keys, changed, strict=True)] == [
            4 * i + 4 <= position for i in range(3)
        ]
    salted = [page_keys(tokens, 4, salt) for salt in (b"", b"image", b"image ", bytes(8), bytes(16))]
    assert len({key for keys in salted for key in keys}) == 15


@pytest.mark.parametrize(("window", "page"), [(1, 2), (4, 4), (6, 4), (7, 2), (8, 4), (5, 8), (128, 64)])
def test_every_bounded_hit(window: int, page: int) -> None:
    """The rules, stated over all lengths: whole pages, all cached, longer than the window, one token left."""
    for cached in range(3 * window + 3):
        for num_tokens in range(1, cached + 2 * page + 1):
            hit = bounded_hit(cached, num_tokens, window, page)
            lengths = range(0, cached + 1, page)
            length = max((n for n in lengths if window < n < num_tokens), default=0)
            assert hit.length == length
            assert hit.replay_start == hit.num_computed == length - min(window, length)
            for row in {hit.num_computed, hit.length, num_tokens - 1}:
                assert hit.first_kept(row, window) == max(0, hit.replay_start, row - window + 1)


def make_cache(mode: Mode, page_tokens: int = 4, window_tokens: int = 6) -> PrefixCache:
    return PrefixCache(PagePool(41), PagePool(41), page_tokens, window_tokens, mode)


def cold_run(cache: PrefixCache, tokens: list[int], step_tokens: int = 99) -> Hit:
    """Compute all tokens in steps of `step_tokens`, and end."""
    pages = admit(cache, page_keys(tokens, cache.page_tokens), len(tokens), step_tokens)
    hit, start = pages.hit, pages.hit.num_computed
    while start < len(tokens):
        count = min(step_tokens, len(tokens) - start)
        pages.reserve(start, count)
        start += count
        pages.commit(page_keys(tokens, cache.page_tokens), start)
    pages.release()
    cache.global_pool.check_integrity({})
    cache.window_pool.check_integrity({})
    return hit


@pytest.mark.parametrize(("mode", "lengths"), [("off", (0, 0)), ("bounded", (20, 20)), ("exact", (20, 20))])
def test_the_same_prompt_three_times(mode: Mode, lengths: tuple[int, int]) -> None:
    cache, prompt, other = make_cache(mode), [1] * 22, [2] * 30
    assert cold_run(cache, prompt) == cold_run(cache, other) == Hit()
    assert tuple(cold_run(cache, prompt).length for _ in range(2)) == lengths
    assert (cache.stats.queries, cache.stats.looked_up_tokens) == (4, 96)
    assert cache.stats.hit_tokens == sum(lengths)
    assert (cache.window_pool.num_cached > 0) == (mode == "exact")
    assert (cache.global_pool.num_cached > 0) == (mode != "off")


@pytest.mark.parametrize("step_tokens", [1, 3, 4, 99])
def test_every_prompt_length_after_a_longer_run(step_tokens: int) -> None:
    """Exact hits reach the last page boundary that leaves a token, page multiples included."""
    bounded, exact = make_cache("bounded"), make_cache("exact")
    for cache in (bounded, exact):
        cold_run(cache, [0] * 28, step_tokens)
    for num_tokens in range(1, 29):
        length = (num_tokens - 1) // 4 * 4
        assert cold_run(exact, [0] * num_tokens) == Hit(length, 0, length)
        assert cold_run(bounded, [0] * num_tokens) == bounded_hit(28, num_tokens, 6, 4)


@settings(deadline=None)
@given(
    states=st.lists(st.booleans(), min_size=8, max_size=8),
    window=st.lists(st.booleans(), min_size=8, max_size=8),
    window_tokens=st.integers(1, 11),
    num_tokens=st.integers(1, 20),
)
def test_an_exact_hit_has_all_states_and_the_window(
    states: list[bool], window: list[bool], window_tokens: int, num_tokens: int
) -> None:
    cache = make_cache("exact", page_tokens=2, window_tokens=window_tokens)
    keys = page_keys(range(16), 2)
    for pool, present in ((cache.global_pool, states), (cache.window_pool, window)):
        for key in (key for key, there in zip(keys, present, strict=True) if there):
            page = pool.allocate()
            pool.register(page, key)
            pool.release(page)

    def is_possible(length: int) -> bool:
        needed = {row // 2 for row in range(max(0, length - window_tokens + 1), length)}
        return all(states[: length // 2]) and all(window[page] for page in needed)

    expected = max(length for length in range(0, min(num_tokens, 17), 2) if is_possible(length))
    match = cache.lookup(keys, num_tokens)
    assert match.hit == Hit(expected, 0, expected)
    assert len(match.pages) == len(match.window_pages) == expected // 2
    first = max(0, expected - window_tokens + 1) // 2
    assert [page != NULL_PAGE for page in match.window_pages] == [i >= first for i in range(expected // 2)]
    cache.undo(match)
    cache.global_pool.check_integrity({})
    cache.window_pool.check_integrity({})
    assert (cache.stats.queries, cache.stats.hit_tokens, cache.stats.looked_up_tokens) == (0, 0, 0)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast' is unknown: choose one of off, bounded, exact"):
        make_cache("fast")  # type: ignore[arg-type]


def test_release_keeps_the_start_of_the_states_and_the_end_of_the_window() -> None:
    cache = make_cache("exact")
    keys = page_keys([0] * 12, 4)
    pages = admit(cache, keys, 12, 12)
    pages.commit(keys, 12)
    pages.release()
    for pool, order in ((cache.global_pool, (2, 1, 0)), (cache.window_pool, (0, 1, 2))):
        for _ in range(40 - 3):
            pool.allocate()
        for number in order:
            assert pool.find(keys[number]) is not None
            pool.allocate()
            assert pool.find(keys[number]) is None

"""Stop strings: where a text ends, in characters and in tokens.

Invariant: a text ends by the stop that was said first, whether it is looked at as a whole or while it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a decoder writes for a character of which bytes are missing."""


def cut_at(token_ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> tuple[str, int, bool]:
    """(text before the stop that is complete first, how many tokens it took to say the stop, whether there was one).

    Of stops that are complete at the same character the longest counts. Without a stop in it: the whole text and all tokens. A
    stop may begin or end within a token.
    """
    text = decode(token_ids)
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return text, len(token_ids), False
    reach, end = min(found)
    low, high = 0, len(token_ids)
    while low < high:  # the shortest beginning whose text has the whole stop
        middle = (low + high) // 2
        if decode(token_ids[:middle]).startswith(text[:reach]):
            high = middle
        else:
            low = middle + 1
    return text[:end], low, True


def settled(text: str, stops: Sequence[str]) -> str:
    """The beginning of an unfinished text that whatever follows leaves as it is: without what may become a stop, and without an
    unfinished character."""
    text = text.rstrip(UNFINISHED)
    longest = max(map(len, stops), default=0)
    for place in range(max(0, len(text) - longest + 1), len(text)):
        if any(stop.startswith(text[place:]) for stop in stops):
            return text[:place]
    return text

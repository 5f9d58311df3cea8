"""Stop strings: where a text ends, in characters and in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def cut_at(token_ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> tuple[str, int, bool]:
    """(text before the first stop, how many tokens it took to say the stop, whether there was one).

    Without a stop in it: the whole text and all tokens. A stop may begin or end within a token.
    """
    text = decode(token_ids)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return text, len(token_ids), False
    end = min(places)
    matched = [stop for stop in stops if text.startswith(stop, end)]
    reach = end + min(len(stop) for stop in matched)
    low, high = 0, len(token_ids)
    while low < high:  # the shortest beginning whose text reaches behind the stop
        middle = (low + high) // 2
        if len(decode(token_ids[:middle])) >= reach:
            high = middle
        else:
            low = middle + 1
    return text[:end], low, True

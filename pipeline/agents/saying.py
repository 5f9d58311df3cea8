"""What a sealed test says of the values that it compares. Its text becomes part of the test (`sealing`): it needs Python 3.7 and
nothing else.

Invariant: values that are equal have one text, and a text comes from what Python itself holds for them, not from what their own
classes say. What is no plain data has none: its class decides what it equals, and is asked only whether it equals everything.
"""

import hashlib
import os

FOREIGN = "?"
LIAR = "!"
"""Of what equals everything."""
LONGEST = 100
PLAIN = (int, float, str, bytes, list, tuple, set, frozenset, dict)


class Nobody:
    """Equals nothing but itself."""


def begin(path):
    """(say, look): both write to the file, with what is imported now."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    write, written = os.write, set()

    def say(place, *values):
        line = " ".join([str(place), *map(text, values)])
        if line not in written:
            written.add(line)
            write(file, (line + "\n").encode())

    def look(place, value):
        """The value, of which it is said when it is no plain data."""
        if text(value) in (FOREIGN, LIAR):
            say(place, value)
        return value

    return say, look


def text(value):
    known = _text(value)
    for mark in (LIAR, FOREIGN):
        if mark in known:
            return mark
    return known if len(known) <= LONGEST else hashlib.sha256(known.encode()).hexdigest()


def _text(value):
    """No plain value's own methods are called, which could say anything."""
    kind = type(value)
    plain = next((base for base in PLAIN if issubclass(kind, base)), None)
    if value is None:
        return "none"
    if plain is None or kind.__eq__ is not plain.__eq__:
        return _foreign(value)
    if plain is int:
        return "n" + int.__format__(value, "x")
    if plain is float:
        if float.__ne__(value, value):
            return FOREIGN
        return "n" + format(float.__int__(value), "x") if float.is_integer(value) else "f" + float.hex(value)
    if plain is str:
        return "s" + str.encode(value, "utf-8", "surrogatepass").hex()
    if plain is bytes:
        return "b" + bytes.hex(value)
    if plain is dict:
        return "d(" + ",".join(sorted(_text(key) + ":" + _text(held) for key, held in dict.items(value))) + ")"
    held = map(_text, plain.__iter__(value))
    if plain in (list, tuple):
        return ("l(" if plain is list else "t(") + ",".join(held) + ")"
    return "u(" + ",".join(sorted(held)) + ")"


def _foreign(value):
    try:
        return LIAR if (value == Nobody()) is True else FOREIGN
    except Exception:
        return FOREIGN

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
    if value is None:
        return "none"
    if issubclass(kind, int):
        return "n" + int.__format__(value, "x")
    if issubclass(kind, float):
        if float.__ne__(value, value):
            return FOREIGN
        return "n" + format(float.__int__(value), "x") if float.is_integer(value) else "f" + float.hex(value)
    if issubclass(kind, str):
        return "s" + str.encode(value, "utf-8", "surrogatepass").hex()
    if issubclass(kind, bytes):
        return "b" + bytes.hex(value)
    for base, mark in ((list, "l"), (tuple, "t")):
        if issubclass(kind, base):
            return mark + "(" + ",".join(map(_text, base.__iter__(value))) + ")"
    for base in (set, frozenset):
        if issubclass(kind, base):
            return "u(" + ",".join(sorted(map(_text, base.__iter__(value)))) + ")"
    if issubclass(kind, dict):
        return "d(" + ",".join(sorted(_text(key) + ":" + _text(held) for key, held in dict.items(value))) + ")"
    try:
        return LIAR if (value == Nobody()) is True else FOREIGN
    except Exception:
        return FOREIGN

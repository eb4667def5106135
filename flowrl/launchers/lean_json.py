"""JSON for programs that have to start at once.

Importing `json` takes as long as starting Python does; the C code behind it takes nothing.
"""

from __future__ import annotations

from _json import encode_basestring_ascii, make_scanner


class _Rules:
    """What the scanner asks of a decoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012


_scan = make_scanner(_Rules())  # pyright: ignore[reportArgumentType]


def loads(text: str):  # type of a JSON value
    """The value in a JSON text.

    Raises:
      ValueError: there is none, or more than one.
    """
    text = text.strip()
    try:
        value, end = _scan(text, 0)
    except StopIteration as error:
        raise ValueError(f"no JSON at character {error.value}") from None
    if end != len(text):
        raise ValueError(f"no JSON at character {end}")
    return value


def dumps(value: object) -> str:
    """A value of JSON's types as text, all of it ASCII.

    >>> dumps({"a": [1, 2.5, None, True, "\\n"]})
    '{"a": [1, 2.5, null, true, "\\\\n"]}'
    """
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            return encode_basestring_ascii(value)
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(map(dumps, value)) + "]"
        case dict():
            pairs = (
                f"{encode_basestring_ascii(key)}: {dumps(item)}" for key, item in value.items()
            )
            return "{" + ", ".join(pairs) + "}"
        case _:
            raise TypeError(f"{value!r} is no value of JSON")

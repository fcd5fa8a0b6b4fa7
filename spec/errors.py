"""The named errors that every part raises. Each message is one line: what was checked, what was expected, what came."""

from __future__ import annotations


def brief(value: object) -> str:
    """`value` in one short line: a plain value as itself, any other by its type, a long one cut.

    Never raises. The value of anything else is not asked for: it may be large, on a device, or not printable.
    """
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print integers of thousands of digits
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """`text` without what would steer a terminal or could not be encoded; line breaks stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


class SwaDecodeMetaError(Exception):
    """Base of all errors that this project raises on purpose.

    The ones with attributes hand those to Exception and word the message when asked for it, so that they pass from
    one process to another.
    """


class ArgumentError(SwaDecodeMetaError, ValueError):
    """An argument has the wrong type, dtype, shape, stride, range or device.

    Attributes: `argument` (its name), `expected`, `got` (words for a person).
    """

    def __init__(self, argument: str, expected: str, got: object) -> None:
        self.argument, self.expected, self.got = argument, expected, str(got)
        super().__init__(argument, expected, self.got)

    def __str__(self) -> str:
        return f"{self.argument}: expected {self.expected}, got {self.got}"


class IllegalBatchError(SwaDecodeMetaError, ValueError):
    """A batch lies outside the legal domain (SPEC.md, section 5).

    Attributes: `rule` ("L1" .. "L7"), `element` (such as "seq_lens[3]"), `found` (words for a person).
    """

    def __init__(self, rule: str, element: str, found: str) -> None:
        self.rule, self.element, self.found = rule, element, found
        super().__init__(rule, element, found)

    def __str__(self) -> str:
        return f"illegal batch, rule {self.rule}: {self.element} {self.found}"


class CaseFileError(SwaDecodeMetaError, ValueError):
    """A case file cannot be read or written.

    Attributes: `path`, `field` (such as "block_table[3][2]", or "" for the file as a whole), `problem`.
    """

    def __init__(self, path: object, field: str, problem: str) -> None:
        self.path, self.field, self.problem = str(path), field, problem
        super().__init__(self.path, field, problem)

    def __str__(self) -> str:
        path = self.path if self.path.isprintable() else repr(self.path)
        return ": ".join(part for part in (path, self.field, self.problem) if part)


class BackendError(SwaDecodeMetaError, RuntimeError):
    """The backend that was asked for (torch, triton, a GPU) is not there."""

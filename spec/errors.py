"""The named errors that every part raises. Each message is one line: what was checked, what was expected, what came."""

from __future__ import annotations


class SwaDecodeMetaError(Exception):
    """Base of all errors that this project raises on purpose."""


class ArgumentError(SwaDecodeMetaError, ValueError):
    """An argument has the wrong type, dtype, shape, stride, range or device.

    Attributes: `argument` (its name), `expected`, `got` (words for a person).
    """

    def __init__(self, argument: str, expected: str, got: object) -> None:
        self.argument, self.expected, self.got = argument, expected, str(got)
        super().__init__(f"{argument}: expected {expected}, got {self.got}")


class IllegalBatchError(SwaDecodeMetaError, ValueError):
    """A batch lies outside the legal domain (SPEC.md, section 5).

    Attributes: `rule` ("L1" .. "L7"), `element` (such as "seq_lens[3]"), `found` (words for a person).
    """

    def __init__(self, rule: str, element: str, found: str) -> None:
        self.rule, self.element, self.found = rule, element, found
        super().__init__(f"illegal batch, rule {rule}: {element} {found}")


class CaseFileError(SwaDecodeMetaError, ValueError):
    """A case file cannot be read or written.

    Attributes: `path`, `field` (such as "block_table[3][2]", or "" for the file as a whole), `problem`.
    """

    def __init__(self, path: object, field: str, problem: str) -> None:
        self.path, self.field, self.problem = str(path), field, problem
        super().__init__(": ".join(part for part in (str(path), field, problem) if part))


class BackendError(SwaDecodeMetaError, RuntimeError):
    """The backend that was asked for (torch, triton, a GPU) is not there."""

"""A mutant: the library with one line of it made wrong, and the tests that should notice."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault.

    Attributes:
      path: the file below the root of the project.
      old: a text that stands in the file exactly once.
      new: what to put in its place.
      fault: what is wrong with it, in a few words.
      tests: the tests that should notice, as pytest takes them: files, or ``file::test``.
    """

    path: str
    old: str
    new: str
    fault: str
    tests: tuple[str, ...]

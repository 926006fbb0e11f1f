"""Flags of a program that tests import next to other programs, which may use the same names."""

from __future__ import annotations

import sys

from absl import flags


def publish(values: flags.FlagValues) -> None:
    """Makes flags of a program's own those that the command line sets and --help lists."""
    flags.FLAGS.append_flag_values(values)
    for name in values:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], values[name])
    values.mark_as_parsed()

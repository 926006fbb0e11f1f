"""Run pytest on the files named as arguments: the `main` of each `py_test` in BUILD."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))

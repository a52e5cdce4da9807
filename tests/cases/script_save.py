"""Run by itself: saves one after the other, with a word on standard error before and after each; loads the last.

Usage: python -m tests.cases.script_save STORE SAVES
"""

from __future__ import annotations

import os
import sys

import torch

import tierload
from tests.cases.stores import SMALL, assert_is, state_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    path, saves = sys.argv[1], int(sys.argv[2])
    for number in range(1, saves + 1):
        state = state_of(number)
        os.write(2, b"SAVE\n")
        tierload.save(state, path, step=number, settings=SMALL)
        os.write(2, b"SAVED\n")
    assert_is(tierload.load(path), saves)

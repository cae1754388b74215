"""Threads of the simulator take turns more often: each waits in a loop for the others."""

import sys

sys.setswitchinterval(1e-4)

"""Tests of fastopt.torch are skipped where torch is missing."""

import pytest

collect_ignore = []
try:
    import torch
except ImportError:
    collect_ignore += [f"test_torch{part}.py" for part in ("", "_clients", "_state", "_tensors")]
else:

    @pytest.fixture(autouse=True)
    def one_thread():
        """Torch's threads take turns with numba's on few CPUs."""
        torch.set_num_threads(1)

"""Tests of fastopt.torch are skipped where torch is missing."""

import pytest

collect_ignore = []
try:
    import torch
except ImportError:
    collect_ignore += ["test_schedules.py", "test_torch.py", "test_torch_clients.py"]
    collect_ignore += ["test_torch_state.py", "test_torch_tensors.py"]
else:

    @pytest.fixture(autouse=True)
    def one_thread():
        """Torch's threads take turns with numba's on few CPUs."""
        torch.set_num_threads(1)

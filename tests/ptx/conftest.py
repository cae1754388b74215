"""The driver without a device, built once."""

import pytest

from ptx.executor import build_driver


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return build_driver(tmp_path_factory.mktemp("driver")).parent

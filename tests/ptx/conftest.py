"""The driver without a device, built once."""

import pytest

from ptx.executor import build_driver


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    build_driver(folder)
    return folder

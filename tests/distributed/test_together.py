"""The file that names the latest checkpoint of updaters and tables."""

import json

import pytest

from fastopt.checkpoint import CheckpointError
from fastopt.distributed import latest_checkpoint

RUN = "0123456789abcdef"


def test_parts_are_in_the_directory_of_the_run(tmp_path):
    assert latest_checkpoint(tmp_path) == {}
    (tmp_path / "latest.json").write_text(json.dumps({"run": RUN, "parts": ["model"]}))
    assert latest_checkpoint(tmp_path) == {"model": tmp_path / RUN / "model"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"run": "..", "parts": ["model"]}),
        json.dumps({"run": RUN, "parts": "model"}),
        json.dumps({"run": RUN, "parts": [1]}),
        json.dumps({"run": RUN, "parts": ["../model"]}),
        json.dumps({"run": RUN, "parts": ["/model"]}),
        json.dumps({"run": RUN, "parts": [".."]}),
    ],
)
def test_a_file_that_names_other_places_is_refused(tmp_path, content):
    (tmp_path / "latest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"latest\.json"):
        latest_checkpoint(tmp_path)

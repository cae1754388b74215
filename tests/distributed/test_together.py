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


PLACES = ("..", ["model"]), *((RUN, p) for p in ("model", [1], ["../model"], ["/model"], [".."]))


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", *(json.dumps({"run": run, "parts": parts}) for run, parts in PLACES)],
)
def test_a_file_that_names_other_places_is_refused(tmp_path, content):
    (tmp_path / "latest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"latest\.json"):
        latest_checkpoint(tmp_path)

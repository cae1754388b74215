"""All ways from an updater to another one that goes on."""

import pickle

WAYS = ("save", "get_states", "dict", "pickle")


def resumed(way, updater, new, tmp_path):
    """The updater `new` with what `updater` has; pickle makes one of its own."""
    if way == "save":
        updater.save(tmp_path / "state")
        new.load(tmp_path / "state")
    elif way == "get_states":
        new.set_states(updater.get_states(dump_optimizer=True))
    elif way == "dict":
        new.load_states_dict(updater.states_dict())
    else:
        new = pickle.loads(pickle.dumps(updater))
    return new

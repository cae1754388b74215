"""The numbers that MXNet computed, replayed: see ``tests/golden/README.md``."""

import copy
import json
import math
from functools import cache
from types import SimpleNamespace

import golden_adapter as adapter
import numpy as np
from scipy import stats

from helpers.paths import GOLDEN

MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())


@cache
def arrays(name):
    return dict(np.load(GOLDEN / name, allow_pickle=False))


def gradient(case, index, step):
    """A gradient of the data set of a case, whose arrays the call may write to."""
    data, start = arrays("data.npz"), f"{case['data']}/p{index}/"
    if case["grad_stype"] != "row_sparse":
        return data[start + "g"][step].copy()
    own = slice(*data[start + "ptr"][step : step + 2])
    values, rows = (data[start + name][own].copy() for name in ("vals", "rows"))
    return adapter.make_row_sparse(values, rows, data[start + "w0"].shape)


def schedule_of(kwargs):
    """Arguments whose schedule is made, if they have one."""
    kwargs = copy.deepcopy(kwargs)
    if isinstance(recorded := kwargs.get("lr_scheduler"), dict):
        of = recorded["$lr_scheduler"], recorded["args"]
        return {**kwargs, "lr_scheduler": adapter.make_lr_scheduler(*of)}
    return kwargs


def updater_of(case, names):
    kwargs = schedule_of(case["kwargs"])
    if of := kwargs.pop("$param_dict", None):
        kwargs["param_dict"] = {int(index): SimpleNamespace(**own) for index, own in of.items()}
    renamed = {"$op_mode": "op_mode", "$rescale_special": "special"}
    kwargs = {renamed.get(name, name): value for name, value in kwargs.items()}
    updater = adapter.make_updater(case["optimizer"], kwargs, names if case["names"] else None)
    for setter, given in case["setup"].items():
        by_key = {int(key[1:]) if key[0] == "#" else key: own for key, own in given.items()}
        getattr(updater.optimizer, setter)(by_key)
    return updater


def replayed(case):
    """Weights after each step, by index, and the updater."""
    parameters = MANIFEST["datasets"][case["data"]]["params"]
    names = {each["index"]: each["name"] for each in parameters}
    updater = updater_of(case, names)
    weights = {k: arrays("data.npz")[f"{case['data']}/p{k}/w0"].copy() for k in names}
    steps = []
    for step in range(case["steps"]):
        for event in (e for e in case["events"] if e["before_step"] == step):
            if event["op"] == "drop_weight_rows":
                for weight in weights.values():
                    weight[event["value"]] = 0
            elif event["op"] == "set_learning_rate":
                updater.optimizer.set_learning_rate(event["value"])
            elif event["op"] == "set_rescale_grad":
                updater.optimizer.rescale_grad = event["value"]
            else:
                assert event["op"] == "roundtrip"
                saved, old = updater.get_states(event["dump_optimizer"]), updater.optimizer
                updater = updater_of(case, names)
                updater.optimizer = updater.optimizer if event["fresh"] else old
                updater.set_states(saved)
        indices = case["schedule"][step] if case["schedule"] else [*weights]
        calls = [indices, [gradient(case, k, step) for k in indices], [weights[k] for k in indices]]
        for call in [calls] if case["call_style"] == "list" else zip(*calls, strict=True):
            updater(*call)
        steps.append({k: weight.copy() for k, weight in weights.items()})
    return {k: np.stack([each[k] for each in steps]) for k in weights}, updater


def near(found, expected, rtol, atol):
    """Whether numbers are near, and NaN and infinities in the same places."""
    if np.shape(found) != np.shape(expected):
        return False
    found, expected = (np.asarray(each, np.float64) for each in (found, expected))
    return np.isclose(found, expected, rtol, atol, equal_nan=True).all()


def same_state(case, tree, found):
    """Whether a state has the recorded nesting and numbers."""
    if tree is None or found is None:
        return tree is found
    if tree["t"] == "array":
        return near(found, arrays(case["file"])[tree["k"]], **case["state_tol"])
    of = tree["v"]
    return len(found) == len(of) and all(
        same_state(case, *pair) for pair in zip(of, found, strict=True)
    )


def outcome(case, compute, agrees):
    """How a case ends: as in MXNet, also in an error, or as we recommend."""
    try:
        found = compute(case)
    except Exception:
        if "error" in case:
            return "raises"
        raise
    if "error" not in case and agrees(found, ""):
        return "same"
    if case.get("alt") and agrees(found, "alt"):
        return "recommended"
    return "works" if "error" in case else "differs"


def outcome_of_optimizer(case):
    """Of the weights after each step, the recommended ones too, and of the final states."""

    def agrees(found, alternative):
        weights, updater = found
        recorded, name = arrays(case["file"]), f"{case['id']}/{alternative or 'w'}"
        states = {} if alternative else case["states"]
        return all(
            near(w, recorded[f"{name}{k}"], **case["tol"]) for k, w in weights.items()
        ) and all(
            same_state(case, tree, adapter.get_state(updater, int(k))) for k, tree in states.items()
        )

    return outcome(case, replayed, agrees)


def is_normal(numbers):
    """Whether numbers are independent ones of the standard normal distribution."""
    size, root = numbers.size, math.sqrt(numbers.size)
    return (
        abs(numbers.mean()) < 5 / root
        and abs(numbers.std() - 1) < 5 / math.sqrt(2 * size)
        and abs(stats.kurtosis(numbers, None)) < 6 * math.sqrt(24 / size)
        and stats.kstest(numbers.ravel(), "norm").statistic < 2.2 / root
    )


def noise_of_sgld(case):
    """The noise of each step, divided by the root of its learning rate."""
    kwargs = schedule_of(case["kwargs"])
    updater, size = adapter.make_updater("sgld", kwargs, None), 64
    places = np.arange(size**2).reshape(size, size)
    weight = np.cos(places * 0.37).astype(case["dtype"])
    clip = kwargs.get("clip_gradient") or np.inf
    for k, step in enumerate(case["steps"]):
        grad = (np.sin(places.astype(float) * 0.11 + k) * (k + 1) / 3).astype(case["dtype"])
        clipped = np.clip(grad.astype(float) * kwargs.get("rescale_grad", 1.0), -clip, clip)
        before = weight.astype(float)
        updater(0, grad, weight)
        drift = step["lr"] / 2 * (clipped + step["wd"] * before)
        yield (weight.astype(float) - before + drift) / math.sqrt(step["lr"])


def is_drawn(case, numbers):
    """Whether the numbers of an initializer are those of the distribution that is expected."""
    expected, half, numbers = case["expect"], case["dtype"] == "float16", numbers.astype(float)
    if expected["dist"] == "orthogonal":
        matrix, square = numbers.reshape(len(numbers), -1), expected["scale"] ** 2
        matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        error = np.abs(matrix @ matrix.T - square * np.eye(len(matrix))).max()
        return error < (2e-2 if half else 2e-5) * max(1, square)
    if expected["dist"] == "normal":
        return is_normal(numbers / expected["sigma"])
    shares = numbers.ravel() / expected["bound"]
    near = stats.kstest(shares, "uniform", (-1, 2)).statistic < 2.2 / math.sqrt(shares.size)
    return near and np.abs(shares).max() <= 1 + (1e-3 if half else 1e-6)


def initialized(case):
    """The text of an initializer, or the array that it has filled."""

    def make(recorded):
        return adapter.make_initializer(recorded[0], copy.deepcopy(recorded[1]))

    kind, attributes, context = case["kind"], case.get("attrs", {}), None
    if kind == "dumps":
        return json.loads(make(case["init"]).dumps())
    if kind == "load":
        store = {key: arrays("initializers.npz")[name] for key, name in case["store"].items()}
        made = adapter.make_load(store, case["default"] and make(case["default"]))
    elif kind == "mixed":
        made = adapter.make_mixed(case["patterns"], [*map(make, case["inits"])])
    elif kind == "fusedrnn":
        made = context = make(case["global_init"])
        attributes = {"__init__": make(case["init"]).dumps()}
    else:
        made = make(case["init"])
    name, array = case["param"], np.full(case["shape"], -7.5, case.get("dtype", "float32"))
    is_plain = case.get("legacy") or not case.get("desc", True)
    made(name if is_plain else adapter.make_init_desc(name, attributes, context), array)
    return array


def outcome_of_initializer(case):
    def agrees(found, alternative):
        if case["kind"] == "dumps":
            return found == json.loads(case["dumps"])
        if case["kind"] == "random":
            return is_drawn(case, found)
        recorded = arrays("initializers.npz")[case["id"] + "/alt" * bool(alternative)]
        return near(found, recorded, 1e-6, 1e-7)

    return outcome(case, initialized, agrees)

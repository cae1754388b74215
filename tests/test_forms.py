"""Natural forms of training loops have the results of Adam by hand, or one error with a cure."""

import multiprocessing
import re
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

import fastopt

LR, STEPS = 0.1, 4
A = np.random.default_rng(0).normal(size=(6, 4))
B = np.random.default_rng(1).normal(size=(6, 3))
START = {"w": np.full((4, 3), 0.5), "b": np.zeros(3)}


def errors(w, b):
    return A @ w + b - B


def gradients(w, b):
    error = errors(w, b)
    return {"w": A.T @ error, "b": error.sum(axis=0)}


class ByHand:
    """Adam of a NumPy user; a count for each name, as in fastopt."""

    def __init__(self):
        self.states = {}

    def __call__(self, name, grad, weight):
        m, v, t = self.states.get(name, (0.0, 0.0, 0))
        m, v, t = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2, t + 1
        self.states[name] = m, v, t
        rate = LR * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        return weight - rate * m / (np.sqrt(v) + 1e-8)


def expected(steps=STEPS):
    step, params = ByHand(), dict(START)
    for _ in range(steps):
        grads = gradients(**params)
        params = {name: step(name, grads[name], params[name]) for name in params}
    return params


def updater():
    return fastopt.Updater(fastopt.Adam(lr=LR))


def copies():
    return {name: weight.copy() for name, weight in START.items()}


def in_place(of_grads=lambda grads: grads, params=None):
    params, step = copies() if params is None else params, updater().step
    for _ in range(STEPS):
        step(of_grads(gradients(params["w"], params["b"])), params)
    return params


def new_arrays():
    params, ours = dict(START), updater()
    for _ in range(STEPS):
        params = ours.updated(gradients(**params), params)
    return params


def pure_functions():
    init, update = fastopt.functional(fastopt.Adam(lr=LR))
    params, state = dict(START), init(START)
    for _ in range(STEPS):
        params, state = update(gradients(**params), state, params)
    return params


def one_vector():
    vector, views = fastopt.flat(START)
    step = updater()
    for _ in range(STEPS):
        step("all", np.concatenate([g.ravel() for g in gradients(**views).values()]), vector)
    return views


def twenty_layers():
    layers, step = [copies() for _ in range(20)], updater()
    for _ in range(STEPS):
        for k, layer in enumerate(layers):
            grads = gradients(**layer)
            step([f"w{k}", f"b{k}"], [grads["w"], grads["b"]], [layer["w"], layer["b"]])
    return layers[-1]


def experts():
    params, step = {k: copies() for k in "abc"}, updater().step
    for chosen in ("ab", "bc", "ca", "abc", "abc"):
        step({k: gradients(**params[k]) for k in chosen}, params, missing="skip")
    return params["b"]


def episodes():
    step = updater()
    for _ in range(3):
        step.states, step.optimizer = {}, fastopt.Adam(lr=LR)
        params = copies()
        for _ in range(STEPS):
            step.step(gradients(**params), params)
    return params


@dataclass
class Layer:
    w: np.ndarray = field(default_factory=START["w"].copy)
    b: np.ndarray = field(default_factory=START["b"].copy)
    activation: str = "tanh"
    name: str | None = None


def dataclasses_with_settings():
    layer, step = Layer(), updater().step
    for _ in range(STEPS):
        step(Layer(**gradients(layer.w, layer.b)), layer)
    return vars(layer) | {"activation": None}


def named_tuples():
    pair = namedtuple("Pair", "w b")
    params, step = pair(**copies()), updater().step
    for _ in range(STEPS):
        step(gradients(*params), params)
    return params._asdict()


def threads():
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: in_place(), range(3)))[-1]


def forked():
    in_place()  # imports and loads kernels
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(in_place)


FORMS = [
    *(in_place, new_arrays, pure_functions, one_vector, twenty_layers, experts, episodes),
    *(dataclasses_with_settings, named_tuples, threads, forked),
]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_form_has_the_results_of_adam_by_hand(form):
    found, by_hand = form(), expected()
    for name in ("w", "b"):
        np.testing.assert_allclose(found[name], by_hand[name], rtol=1e-10)


@pytest.mark.parametrize("number", [np.array(0.5), np.array([0.5]), np.array([[0.5]])])
@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.array])
def test_numbers_are_parameters_and_gradients(number, kind):
    params, by_hand, value, step = {"x": number.copy(), "w": np.ones(2)}, ByHand(), 0.5, updater()
    for _ in range(STEPS):
        grad = kind(value - 2.0)
        grad = grad.reshape(number.shape) if kind is np.array else grad
        step.step({"x": grad, "w": np.ones(2)}, params)
        value = by_hand("x", value - 2.0, value)
    assert params["x"].item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("other", [np.float64, np.float16, np.float32])
def test_gradients_of_another_dtype_are_converted(other):
    params = {"w": np.ones(3, np.float32)}
    updater().step({"w": np.array([1.0, -2.0, 0.5], other)}, params)
    np.testing.assert_allclose(params["w"], [0.9, 1.1, 0.9], rtol=1e-6)


ONES = np.ones(3)
REFUSED = {
    "a number as weight": (TypeError, r"np\.array\(x\)", {"a": 1.0}, {"a": 2.0}),
    "a NumPy number as weight": (TypeError, r"np\.array\(x\)", {"a": 1.0}, {"a": np.float64(2)}),
    "a missing gradient": (ValueError, 'missing="skip"', {}, {"a": ONES}),
    "a gradient without a weight": (ValueError, "'b' has no weight", {"a": ONES, "b": ONES}, None),
    "another shape": (ValueError, r"reshape\(\(3,\)\)", {"a": np.ones((3, 1))}, None),
    "a list as gradient": (TypeError, "must be a NumPy array.*got list", {"a": [1.0] * 3}, None),
    "integers as gradient": (TypeError, r"astype\('float64'\)", {"a": np.ones(3, int)}, None),
    "a mask": (TypeError, r"filled\(0\)", {"a": np.ma.array(ONES, mask=[0, 1, 0])}, None),
    "integers as weight": (TypeError, "must be float16", {"a": ONES}, {"a": np.ones(3, int)}),
    "keys that are tuples": (TypeError, "strings or integers", {}, {(0, 1): ONES}),
    "a generator": (TypeError, "nested like the weights", (g for g in [ONES]), [ONES.copy()]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_form_names_the_cure_and_changes_nothing(case):
    error, words, grads, weights = REFUSED[case]
    weights = {"a": ONES.copy()} if weights is None else weights
    before, step = repr(weights), updater()
    with pytest.raises(error, match=words):
        step.step(grads, weights)
    assert repr(weights) == before
    assert step.states == {}


FIRST_LINES = {
    "opt = torch.optim.Adam(params, lr=1e-3)": (
        lambda: fastopt.Adam([ONES], lr=1e-3),
        "takes no weights.*Updater",
    ),
    "opt = optim.SGD(lr=0.1)": (lambda: fastopt.optim, "optimizer is the module"),
    "opt.step()": (lambda: fastopt.Adam(lr=1e-3).step(), "called by an updater"),
    "opt.zero_grad()": (lambda: updater().zero_grad(), "arguments of each call"),
    "clip_grad_norm_(params, 1.0)": (lambda: fastopt.clip_grad_norm_, "clip_global_norm=1.0"),
    "opt.state_dict()": (lambda: fastopt.Adam().state_dict(), r"Updater\(optimizer\)\.state_dict"),
    "optax.adam(1e-3)": (lambda: fastopt.adam(1e-3), "did you mean Adam"),
    "tx.init(params)": (lambda: fastopt.Adam(1e-3).init(START), "functional"),
    "optax.apply_updates(params, updates)": (lambda: fastopt.apply_updates, "updated"),
    "optax.chain(optax.clip(1.0), optax.adam(1e-3))": (lambda: fastopt.chain, "of Updater"),
    "minimize(fun, x0, method='adam')": (
        lambda: fastopt.minimize(lambda x: (x @ x, 2 * x), ONES, method="adam"),
        "optimizer takes it",
    ),
    "model.finish_update(Updater())": (
        lambda: updater()((0, "W"), ONES, copies()["w"]),
        "an index is not a tuple .*fastopt.adapters",
    ),
    "updater.step(grads, model)": (
        lambda: updater().step({"w": ONES}, object()),
        "weights must be arrays, or dicts, .* got object: pass a dict of its arrays",
    ),
    "Adam(learn_rate=0.001)": (
        lambda: fastopt.Adam(learn_rate=0.001),
        "did you mean learning_rate",
    ),
    "Adam(0.001, beta_1=0.9)": (lambda: fastopt.Adam(0.001, beta_1=0.9), "did you mean beta1"),
    "model.compile(optimizer=Adam())": (
        lambda: updater().apply_gradients([]),
        r"updater\.step\(grads, weights\)",
    ),
}


@pytest.mark.parametrize("line", FIRST_LINES)
def test_a_first_line_of_another_library_leads_to_the_right_one(line):
    call, words = FIRST_LINES[line]
    with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
        call()
    assert re.search(words, str(caught.value)), caught.value


def test_first_lines_that_work():
    """Names and positions of torch, optax, SciPy, Keras and scikit-learn."""
    from scipy.optimize import minimize

    made = [
        fastopt.Adam(1e-3),
        fastopt.Adam(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
        fastopt.AdamW(learning_rate=1e-3, weight_decay=0.01),
        fastopt.SGD(lr=0.1, momentum=0.9),
        fastopt.RMSProp(lr=1e-3),
        fastopt.Lion(lr=lambda t: 1e-3),
    ]
    for optimizer in [*made, "adam", "adamw", "sgd"]:
        params = copies()
        fastopt.Updater(optimizer).step(gradients(**params), params)
        assert (params["w"] != START["w"]).all()

    def fun(x):
        return x @ x, 2 * x

    method = fastopt.scipy_method("adam", lr=0.1)
    for found in (
        minimize(fun, ONES, jac=True, method=method),
        minimize(lambda x: x @ x, ONES, jac=lambda x: 2 * x, method=method),
        minimize(fun, ONES, jac=True, method=method, options={"maxiter": 500}),
        fastopt.minimize(fun, ONES, lr=0.1),
        fastopt.minimize(fun, ONES, optimizer="adam", lr=0.1, steps=500),
        fastopt.minimize(fun, [1.0, 1.0], jac=True, lr=0.1),
    ):
        assert found.success
        assert np.abs(found.x).max() < 1e-2

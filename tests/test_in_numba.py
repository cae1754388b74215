"""Functions of an optimizer inside users' compiled code."""

import json
import pickle

import numpy as np
import pytest
from numba import njit, prange

import fastopt
from fastopt._engine.validate import leaves
from helpers.cases import CASES, exhaustive, kept
from helpers.refusals import check_refused, each

RATES = np.array([0.05, 0.0, 0.2])
SETTINGS = {"clip_gradient": 1.5, "rescale_grad": 0.5}


@njit
def run(functions, weight, grads, rates):
    """Update with the optimizer's learning rate, then with other rates."""
    state = functions.init(weight)
    for k in range(len(grads)):
        functions.update(grads[k], weight, state)
    for k in range(len(grads)):
        functions.update(grads[k], weight, state, rates[k])
    return state


@njit
def run_rows(functions, table, values, indices, rates):
    """Update rows with the optimizer's learning rate and another one in turn."""
    state = functions.init(table)
    for k in range(len(values)):
        functions.update_rows(values[k], indices[k], table, state)
        functions.update_rows(values[k], indices[k], table, state, lr=rates[k])
    return state


def at_rates(updater, calls):
    """Call an updater with each gradient, at a learning rate or the optimizer's own (None)."""
    own = updater.optimizer.lr
    for grad, weight, rate in calls:
        updater.optimizer.lr = own if rate is None else float(rate)
        updater("w", grad, weight)
    updater.optimizer.lr = own


def assert_same(state, weight, updater, expected):
    """The bits of weight, state and count are those of the updater."""
    assert weight.tobytes() == expected.tobytes()
    for own, other in zip(state.arrays, leaves(updater.states["w"]), strict=True):
        assert (own.tobytes(), own.dtype) == (other.tobytes(), other.dtype)
    assert state.count[0] == updater.optimizer.num_update


def check(functions, updater, weight, grads, rates):
    """Steps at the optimizer's rate and at `rates` have the bits of the updater."""
    expected = weight.copy(order="K")
    state = run(functions, weight, tuple(grads), rates)
    at = [None] * len(grads) + list(rates)
    at_rates(updater, zip([*grads] * 2, [expected] * len(at), at, strict=True))
    assert_same(state, weight, updater, expected)


def compiles(case):
    """Whether an optimizer of this form has functions."""
    try:
        return bool(fastopt.jit_functions(case.make()))
    except TypeError:
        return False


FORMS = [case for case in CASES if compiles(case)]
REFUSED = {str(case) for case in CASES if case not in FORMS}


def test_only_rules_that_need_python_are_refused():
    python = {"lbsgd", "sgld", "test", "prodigy", "dadaptadam", "schedulefreeprodigy"}
    assert {name.split("-")[0] for name in REFUSED} == {*python, "nadam"}


@pytest.mark.parametrize("case", kept(FORMS, "lamb"), ids=str)
def test_every_rule_has_the_bits_of_an_updater(case, rng):
    settings = {**SETTINGS, "wd": case.wd}
    real = (np.float32, np.float64)[FORMS.index(case) % 2]
    functions = fastopt.jit_functions(case.make(**settings))
    start = rng.normal(size=(37, 5)).astype(real)
    grads = tuple(rng.normal(size=(37, 5)).astype(real) for _ in RATES)
    check(functions, case.updater(**settings), start.copy(), grads, RATES)
    values = tuple(rng.normal(size=(6, 5)).astype(real) for _ in RATES)
    indices = tuple(rng.integers(0, 37, 6) for _ in RATES)
    weight, expected, updater = start.copy(), start.copy(), case.updater(**settings)
    state = run_rows(functions, weight, values, indices, RATES)
    pairs = [pair for pair in zip(values, indices, strict=True) for _ in range(2)]
    rates = [rate for each in RATES for rate in (None, each)]
    at_rates(updater, zip(pairs, [expected] * len(rates), rates, strict=True))
    assert_same(state, weight, updater, expected)


@pytest.mark.parametrize("name", ["adamw", *exhaustive("lamb")])
@pytest.mark.parametrize("orders", ["FF", *exhaustive("CC", "FC", "CA")])
@pytest.mark.parametrize("shape", [(6, 5), (70_000, 1)])
@pytest.mark.parametrize("dtype", ["d", *exhaustive("f")])
def test_any_order_size_and_dtype_of_gradients_is_read(name, orders, shape, dtype, rng):
    updater = fastopt.Updater(fastopt.optimizer.create(name, learning_rate=0.1))
    functions = fastopt.jit_functions(updater.optimizer)
    weight = np.array(rng.normal(size=shape), np.float32, order=orders[0])
    grad = rng.normal(size=(2 * shape[0], shape[1])).astype(dtype)[::2]
    grad = grad if orders[1] == "A" else np.array(grad, order=orders[1])
    check(functions, updater, weight, (grad, grad, grad), np.full(3, 0.1, np.float32))


def test_a_gradient_that_is_converted_is_read_before_it_is_freed():
    """An array of this size goes back to the operating system when it is freed."""
    init, update, _ = fastopt.jit_functions(fastopt.SGD(learning_rate=0.5))
    weight = np.ones(1 << 22, np.float32)

    @njit
    def once(grad, weight, state):
        update(grad, weight, state)

    once(np.ones(weight.shape), weight, init(weight))
    assert (weight == 0.5).all()


def test_multipliers_of_a_parameter_maximize_and_first_states_are_those_of_the_optimizer(rng):
    def make():
        made = fastopt.DCASGD(lr=0.1, wd=0.1, momentum=0.9, maximize=True, begin_num_update=7)
        made.set_lr_mult({"w": 0.5})
        made.set_wd_mult({"w": 2.0})
        return made

    functions, (weight, grad) = fastopt.jit_functions(make(), "w"), rng.normal(size=(2, 3))
    check(functions, fastopt.Updater(make()), weight, (grad,), np.ones(1, int))


def test_a_rule_of_ones_own_is_compiled(rng):
    @fastopt.rule(state=("m",), hyper=("lr", "beta", "rate"))
    def signs(weight, grad, state, h):
        m = h.beta * state[0] + grad
        return weight - h.rate * h.lr * m, (m,)

    class Signs(fastopt.optimizer.Optimizer):
        rule = signs

        @fastopt.optimizer.constant
        def hyper(self, t, lr, wd):
            return {"beta": 0.5, "rate": 1.0 if lr == 0 else 2 / (1 + lr - 0.5)}

    weight, grad = rng.normal(size=(2, 3))
    check(fastopt.jit_functions(Signs()), fastopt.Updater(Signs()), weight, (grad,) * 3, RATES)


def test_states_go_to_an_updater_and_its_checkpoint_and_back(rng):
    def make():
        return fastopt.Nadam(lr=0.1, per_parameter=True)

    updater, whole, other, new = (fastopt.Updater(make()) for _ in range(4))
    functions, (weight, grad) = fastopt.jit_functions(make()), rng.normal(size=(2, 4))
    expected = weight.copy()
    for _ in range(6):
        whole("w", grad, expected)
    updater("w", grad, weight)
    state = functions.from_updater(updater, "w")
    functions.update(grad, weight, state)
    functions.to_updater(updater, "w", state)
    updater("w", grad, weight)
    other.load_state_dict(updater.state_dict())
    state = functions.from_updater(other, "w")
    functions.update(grad, weight, state)
    functions.to_updater(new, "w", pickle.loads(pickle.dumps(state)))
    for _ in range(2):
        new("w", grad, weight)
    assert_same(functions.from_updater(new, "w"), weight, whole, expected)


def test_updaters_with_other_updates_and_states_of_other_rules_are_refused():
    def updated(dtype=np.float64, settings=None, **arguments):
        updater = fastopt.Updater(fastopt.Adam(**arguments), **settings or {})
        updater("w", np.ones(2, dtype), np.ones(2, dtype))
        return updater

    adam, adamw, sgd = map(fastopt.jit_functions, ("adam", "adamw", "sgd"))
    catching_up = fastopt.Updater(fastopt.AdamW(sparse_decay="catch_up"))
    weight, updater, sgd_updater = np.ones(2), updated(lr=lambda t: 0.1), fastopt.Updater("sgd")
    new, state = adam.init(weight), adam.from_updater(updater, "w")
    for code, words in {
        "adam.to_updater(sgd_updater, 'w', new)": "'w': the updater's optimizer must have rule ad",
        "sgd.to_updater(sgd_updater, 'w', new)": "state must be that of these functions, got State",
        "sgd.update(weight, weight, new)": r"update: state must be what init\(weight\) returned",
        "adam.from_updater('w', updater)": "updater must be an Updater, before the index, got 'w'",
        "adam.from_updater(updated(np.float16, multi_precision=True), 'w')": "'w': .* a master",
        "adam.from_updater(updated(state_dtype='int8'), 'w')": "'w': .* is int8; leave state_dtype",
        "adam.from_updater(updated(beta1=0.5), 'w')": r"'w': .* beta1.*.optimizer, 'w'",
        "adam.from_updater(updated(clip_gradient=1.0), 'w')": "other settings",
        "adam.from_updater(updated(settings={'groups': {}}), 'w')": "groups",
        "adam.from_updater(updated(settings={'accumulate': 2}), 'w')": "no accumulate of",
        "adam.to_updater(updated(settings={'clip_global_norm': 1}), 'w', state)": "no clip_gl",
        "adamw.to_updater(catching_up, 'w', state)": "'w': .*sparse_decay='touched'",
    }.items():
        check_refused(code, f"TypeError: {words}", {**globals(), **locals()})
    updater("w", np.ones(2), weight)
    error = "ValueError: 'w': the state has 1 updates, the updater 2: call from_updater again"
    check_refused("adam.to_updater(updater, 'w', state)", error, locals())
    assert updater.optimizer.num_update == 2


NO_RATE = "TypeError: lr must be a real number, got .* such as state.count"

FAILING = {
    "update(np.ones((2, 3)), weight, state)": r"ValueError: differ in shape.* \(2, 3\), \(3, 2\)",
    "update(one, weight, of_other)": r"ValueError: state must be .* \(3, 2\)",
    "update(one.T.copy(), one.T.copy(), state)": r"ValueError: state must be .* \(2, 3\)",
    "update(one, weight, state, np.nan)": "ValueError: lr must be",
    "update(one.astype(int), weight, state)": "TypeError: update: grad",
    "update(one, weight[:, :1], state)": "TypeError: update: weight",
    "update_rows(one[:, None], rows, weight, state)": "ValueError: values must have",
    "update_rows(one, rows, weight, state)": r"ValueError: \(3, 2\), \(2,\), \(3, 2\)",
    "update_rows(one[:2], rows, weight, of_other)": r"ValueError: state must be .* \(3, 2\)",
    "update_rows(one[:2], np.array([0, 3]), weight, state)": "IndexError: update_rows",
    "update_rows(one[:2], np.array([-1, 0]), weight, state)": "IndexError: update_rows",
    "update_rows(one[:2], rows[np.newaxis], weight, state)": "TypeError: update_rows: indices",
    "update_rows(one, rows, np.asfortranarray(weight), state)": "TypeError: update_rows: table",
    "update_rows(one, rows * 1.0, weight, state)": "TypeError: update_rows: indices",
    **each("update(one, weight, state, {})", NO_RATE, "np.ones(1)", "np.array(1)", "None", "True"),
    **each("update_rows(one[:2], rows, weight, state, {})", NO_RATE, "np.ones(1)", "'1'", "[1]"),
    "update(one, weight, state, np.float16(1))": "TypeError: numba has no float16; pass a float",
}


def test_a_call_that_fails_changes_nothing():
    functions, weight, one = fastopt.jit_functions("adam"), np.ones((3, 2)), np.ones((3, 2))
    state, of_other = functions.init(weight), functions.init(np.ones((4, 2)))
    names = {"weight": weight, "one": one, "state": state, "of_other": of_other}
    names |= {"np": np, "rows": np.array([0, 2])}
    for code, error in FAILING.items():
        check_refused(code, error, {**functions._asdict(), **names})
    with pytest.raises(TypeError, match="got array"):  # from compiled code too
        run(functions, weight, (one,), one)
    assert (weight == 1).all()
    assert not state.count[0]
    assert not np.any(state.arrays)


REASONS = {
    "Adam(lr=lambda step: 0.1)": "leave it out, and pass the learning rate",
    "Adam(state_dtype='int8')": "its state is int8; leave state_dtype out",
    "Muon()": "it updates weights in Python",
    "SGLD()": "random numbers",
    "Nadam()": "use per_parameter=True",
    "AdamW(sparse_decay='catch_up')": "use sparse_decay='touched'",
    "AdamW(rescale_grad=0.0)": "skips updates",
    "Prodigy()": "computed in Python in each step",
}


@pytest.mark.parametrize("code", REASONS)
def test_what_cannot_be_compiled_is_one_error_with_its_cure(code):
    words = f"TypeError: jit_functions: .* cannot be compiled as .*{REASONS[code]}"
    check_refused(f"fastopt.jit_functions(fastopt.{code})", words, globals())


def test_hyper_that_reads_the_rate_otherwise_takes_no_rate():
    class Rooted(fastopt.SGD):
        @fastopt.optimizer.constant
        def hyper(self, t, lr, wd):
            return {"lr": lr**0.5}

    functions, weight = fastopt.jit_functions(Rooted(lr=0.25)), np.ones(1)
    functions.update(np.ones(1), weight, functions.init(weight))
    assert weight[0] == 0.5
    with pytest.raises(TypeError, match="must be called in Python: no lr"):
        functions.update(np.ones(1), weight, functions.init(weight), 0.1)


def test_weights_are_updated_on_the_threads_of_the_caller(rng):
    functions = fastopt.jit_functions("adam")

    @njit(parallel=True)
    def steps(weights, grads):
        for k in prange(len(weights)):
            state = functions.init(weights[k])
            for _ in range(3):
                functions.update(grads[k], weights[k], state)

    weights, grads = rng.normal(size=(4, 9)), rng.normal(size=(4, 9))
    expected, updater = weights.copy(), fastopt.Updater("adam")
    steps(weights, grads)
    for k in range(4):
        for _ in range(3):
            updater(k, grads[k], expected[k])
    assert weights.tobytes() == expected.tobytes()


PROGRAM = """
import json, sys
import numpy as np
from numba import njit
import fastopt

made = fastopt.jit_functions(fastopt.Adam(lr=float(sys.argv[1]), formula=sys.argv[2]))
init, update, _ = made

@njit
def inner(weight, state):
    made.update(np.ones_like(weight), weight, state)

@njit(cache=True)
def by_name(weight):
    state = init(weight)
    update(np.ones_like(weight), weight, state)

@njit(cache=True)
def by_argument(weight, functions):
    state = functions.init(weight)
    functions.update(np.ones_like(weight), weight, state)

@njit(cache=True)
def by_helper(weight):
    inner(weight, init(weight))

def closed(functions):
    @njit(cache=True)
    def by_closure(weight):
        state = functions.init(weight)
        functions.update(np.ones_like(weight), weight, state)
    return by_closure

found = []
for call in by_name, by_argument, by_helper, closed(made):
    weight = np.ones(2)
    call(weight, *[made] * (call is by_argument))
    found.append([weight[0], sum(call.stats.cache_hits.values())])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_callers_in_numbas_cache_are_reused_until_optimizer_or_numbers_change(tmp_path, run_python):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)

    def run_with(lr, formula):
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import program"
        return json.loads(run_python(code, lr, formula, NUMBA_CACHE_DIR=str(tmp_path / "cache")))

    def expected(lr, formula):
        weight = np.ones(2)
        fastopt.Updater(fastopt.Adam(lr=lr, formula=formula))("w", np.ones(2), weight)
        return weight[0]

    for lr, formula, hits in (
        ("0.5", "torch", [0, 0, 0, 0]),
        ("0.5", "torch", [1, 1, 1, 1]),
        ("0.25", "torch", [0, 1, 0, 0]),
        ("0.25", "mxnet", [0, 0, 0, 0]),
    ):
        assert run_with(lr, formula) == [[expected(float(lr), formula), each] for each in hits]

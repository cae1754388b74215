"""fastopt.torch: like torch.optim where torch has the optimizer; in the tensors' memory."""

import copy
import doctest
import importlib
import pickle
import pkgutil

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler

import fastopt
import fastopt.torch
from fastopt import lr_scheduler as ours
from fastopt.arguments import Real, arg
from helpers.pages import blocks, printed
from helpers.paths import ROOT
from helpers.torch_runs import check_like_torch, saved


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def losses(net, opt, steps=5, schedule=None, seed=2):
    """Train on random data; return the losses."""
    torch.manual_seed(seed)
    x, y = torch.randn(16, 5), torch.randn(16, 2)
    found = []
    for _ in range(steps):
        opt.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        opt.step()
        found.append(loss.item())
        if schedule is not None:
            schedule.step()
    return found


def trained(value=1.0, shape=(3,), name="SGD", **options):
    """A parameter, and an optimizer of it; the gradient is 1."""
    param = Parameter(torch.full(shape, value))
    param.grad = torch.ones(shape)
    return param, getattr(fastopt.torch, name)([param], **{"lr": 0.5, **options})


CASES = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"betas": (0.8, 0.9), "eps": 1e-3}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("RMSprop", {"alpha": 0.9}),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1, "rho": 0.8}),
    ("Adamax", {"weight_decay": 0.1, "eps": 0.1}),
    ("NAdam", {"weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Rprop", {"etas": (0.4, 1.3)}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_losses_are_those_of_torch_also_after_loading_each_others_state(name, options):
    pairs = []
    for library in (torch.optim, fastopt.torch):
        net = model()
        opt = getattr(library, name)(net.parameters(), **options)
        schedule = lr_scheduler.ExponentialLR(opt, 0.5)
        pairs.append((net, opt, losses(net, opt, schedule=schedule)))
    (theirs, opt, expected), (ours, own, found) = pairs
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert own.param_groups[0].keys() == opt.param_groups[0].keys()

    crossed = []
    for library, net, of in ((fastopt.torch, theirs, opt), (torch.optim, ours, own)):
        net = copy.deepcopy(net)
        after = getattr(library, name)(net.parameters())
        after.load_state_dict(saved(of))
        crossed.append(losses(net, after))
    expected = losses(theirs, opt)
    np.testing.assert_allclose(crossed, [expected, expected], rtol=1e-5)


def test_every_optimizer_and_those_of_torch_have_a_class():
    known = {
        name
        for name, kind in fastopt.optimizer.opt_registry.items()
        if kind.__module__.startswith("fastopt.") and name not in ("test", "ccsgd")
    }
    ours = {name.lower() for name in fastopt.torch.recipes.names()}
    assert ours == known | {"sparseadam"}
    assert set(fastopt.torch.recipes.names()) <= set(dir(fastopt.torch))


def test_a_group_can_be_added_and_a_failed_addition_changes_nothing():
    param, opt = trained()
    other = Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="int64"):
        opt.add_param_group({"params": [torch.ones(2, dtype=torch.int64)]})
    with pytest.raises(ValueError, match="momentum"):
        opt.add_param_group({"params": [other], "momentum": float("nan")})
    opt.add_param_group({"params": [other], "lr": 0.25})
    other.grad = torch.ones(2)
    opt.step()
    assert [param.tolist(), other.tolist()] == [[0.5] * 3, [0.75] * 2]
    assert len(opt.updaters) == len(opt.param_groups) == 2


def test_weights_change_in_their_memory_and_autograd_notices():
    param, opt = trained()
    address, version = param.data_ptr(), param._version
    held = (param * param).sum()  # keeps the values for its backward pass
    opt.step()
    assert (param.data_ptr(), param._version) == (address, version + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.backward()


LAYOUTS = {
    "transposed": lambda: torch.ones(3, 4).t(),
    "strided": lambda: torch.ones(4, 8)[:, ::2],
    "channels_last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.ones(0, 4),
    "float64": lambda: torch.ones(3, dtype=torch.float64),
    "float16": lambda: torch.ones(3, dtype=torch.float16),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_any_layout_and_dtype_are_updated(layout):
    param = Parameter(LAYOUTS[layout]())
    rounding = "stochastic" if param.dtype.itemsize == 2 else "nearest"
    opt = fastopt.torch.SGD([param], lr=0.5, rounding=rounding)
    for grad in (torch.ones_like(param), torch.full(param.shape, 0.5, dtype=param.dtype)):
        param.grad = grad
        opt.step()
    assert torch.equal(param.detach(), torch.full_like(param, 0.25))


@pytest.fixture(params=[True, False])
def layout(request, monkeypatch):
    """Whether compiled code knows the layout of tensors."""
    if not request.param:
        monkeypatch.setattr(fastopt.torch.tensors, "layout", lambda: None)


@pytest.mark.usefixtures("layout")
def test_gradients_of_another_layout_or_at_another_address_are_found():
    param = Parameter(torch.zeros(2, 2))
    opt = fastopt.torch.SGD([param], lr=1.0)
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for grad in (base, base.t(), base, torch.ones(1).expand(2, 2), base.clone()):
        before = param.detach().clone()
        param.grad = grad
        opt.step()
        assert torch.equal(before - param.detach(), grad)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("others", [0, 1])
def test_a_gradient_at_a_known_address_may_have_another_dtype_or_shape(others):
    """As after ``p.grad.data = other``: torch checks assignments to ``grad`` alone."""
    param = Parameter(torch.zeros(4))
    rest = [Parameter(torch.zeros(4)) for _ in range(others)]
    memory, opt = torch.ones(4), fastopt.torch.SGD([param, *rest], lr=1.0)
    param.grad = memory
    opt.step()
    param.grad.data = memory.view(torch.float64).fill_(2.0)
    with pytest.raises(ValueError, match=r"gradient must have shape \(4,\), got \(2,\)"):
        opt.step()
    param.grad.data = memory.view(torch.float16)[::2].contiguous()
    before = param.detach().clone()
    opt.step()
    assert torch.equal(param.detach(), before - param.grad.detach().float())
    param.grad.data = memory.view(2, 2)
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(2, 2\)"):
        opt.step()


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("others", [0, 1])
def test_gradients_that_are_negated_or_zero_lazily_are_read_by_value(others):
    """Also at the address of an earlier one; autograd negates the imaginary part of a conjugate."""
    params = [Parameter(torch.zeros(2)) for _ in range(1 + others)]
    memory, opt = torch.ones(2), fastopt.torch.SGD(params, lr=1.0)
    kinds = (memory, torch._neg_view(memory), memory, torch._efficientzerotensor(2))
    for grad, expected in zip(kinds, (-1, 0, -1, -1), strict=True):
        params[0].grad = grad
        opt.step()
        assert params[0].tolist() == [expected] * 2
    params[0].grad = None
    (torch.complex(torch.zeros(2), params[0]).conj() * (1 + 2j)).real.sum().backward()
    before = params[0].detach().clone()
    opt.step()
    assert torch.equal(before - params[0].detach(), params[0].grad)


def test_parameters_that_are_negated_lazily_are_refused():
    negated = torch._neg_view(torch.ones(2))
    with pytest.raises(TypeError, match=r"table is a lazily negated .*resolve_neg"):
        fastopt.torch.SGD([("table", Parameter(negated))], lr=1.0)
    first, second = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    opt = fastopt.torch.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    for _ in range(2):
        first.grad, second.grad = torch.ones(2), torch.ones(2)
        opt.step()
    second.data = torch._neg_view(second.data)  # the same memory
    with pytest.raises(TypeError, match=r"parameter 1 is a lazily negated"):
        opt.step()
    assert (first.tolist(), second.tolist()) == ([-1, -1], [1, 1])


@pytest.mark.usefixtures("layout")
def test_data_may_have_another_form_at_the_same_address():
    memory = torch.ones(4)
    square, param = memory.view(2, 2), Parameter(memory)
    opt = fastopt.torch.SGD([param], lr=1.0)
    for other in (memory, memory[:2], square, square.t(), memory.view(torch.float64)):
        param.grad, param.data = None, other
        param.grad = torch.arange(param.numel()).view(param.shape).to(param.dtype)
        before = param.detach().clone()
        opt.step()
        assert torch.equal(param.detach(), before - param.grad)


def test_a_closure_computes_gradients_and_its_loss_is_returned():
    param, opt = trained()

    def closure():
        opt.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure).item() == 3
    assert param.tolist() == [0, 0, 0]


def test_hooks_run_around_a_step():
    param, opt = trained()
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append(param.tolist()[0]))
    opt.register_step_post_hook(lambda *_: seen.append(param.tolist()[0]))
    opt.step()
    assert seen == [1.0, 0.5]


def test_a_grad_scaler_unscales_and_skips_steps_that_overflow():
    param, opt = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for loss in (param.sum(), param.sum() * torch.inf):
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    assert param.tolist() == [0.5] * 3
    assert scaler.get_scale() == 2


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-8])
def test_the_epsilon_of_sparse_adam_is_that_of_torch(size, dense):
    """A dense gradient of fastopt.torch is that of all rows of torch."""

    def run(library):
        param = Parameter(torch.zeros(4, 3))
        opt = library.SparseAdam([param], lr=0.1, maximize=True)
        for step in range(4):
            grad = torch.full((4, 3), size * (step + 1))
            if not dense:
                grad[::2] = 0
            ours = dense and library is fastopt.torch
            param.grad = grad if ours else grad.to_sparse(1)
            opt.step()
        return param

    check_like_torch(run, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_rows_without_a_gradient_are_not_touched(name):
    param = Parameter(torch.ones(5, 2))
    opt = getattr(fastopt.torch, name)([param], lr=0.1, weight_decay=0.1)
    listed = [[3, 1, 3]], torch.ones(3, 2), (5, 2)
    for _ in range(2):
        param.grad = torch.sparse_coo_tensor(*listed, check_invariants=True)
        opt.step()
    assert (param != 1).any(dim=1).tolist() == [False, True, False, True, False]


@pytest.mark.usefixtures("layout")
@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize(("shape", "indexed"), [((3, 2), 1), ((3, 2), 2), ((2, 3, 2), 2)])
def test_sparse_gradients_are_those_of_torch(name, shape, indexed):
    """Of rows, elements or leading dimensions; some dense, empty, or with an index twice."""

    def run(library):
        param = Parameter(torch.ones(shape))
        opt = getattr(library, name)([param], lr=0.1)
        for step in range(5):
            grad = torch.zeros(shape)
            if step != 3:
                grad[step % 2, 1] = step + 1.0
            is_dense = step == 3 and name != "SparseAdam"
            grad = grad if is_dense else grad.to_sparse(indexed)
            if step == 2:
                twice = torch.cat([grad.indices()] * 2, 1), torch.cat([grad.values()] * 2)
                grad = torch.sparse_coo_tensor(*twice, shape, check_invariants=True)
            if step == 4:  # the other library continues
                state = saved(opt)
                other = fastopt.torch if library is torch.optim else torch.optim
                opt = getattr(other, name)([param], lr=0.1)
                opt.load_state_dict(state)
            param.grad = grad
            opt.step()
        return [param, {k: v for k, v in opt.state[param].items() if k != "step"}]

    check_like_torch(run)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("Muon", {}, (3, 2)),
        ("GroupAdaGrad", {}, (3, 2)),
        ("Adam", {"clip_adaptive": 0.1}, (3, 2)),
        ("Adam", {}, ()),
    ],
)
def test_sparse_gradients_of_elements_are_refused_where_rows_count(name, options, shape):
    params = [Parameter(torch.ones(shape)) for _ in range(2)]
    opts = [getattr(fastopt.torch, name)([("w", param)], lr=0.1, **options) for param in params]
    params[0].grad = torch.ones(shape).to_sparse()
    with pytest.raises(ValueError, match=r"w: a gradient with sparse_dim .*to_dense\(\)"):
        opts[0].step()
    assert torch.equal(*params)
    for param, opt in zip(params, opts, strict=True):
        param.grad = torch.ones(shape)
        opt.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("groups", [1, 2])
def test_clip_global_norm_limits_the_norm_over_all_groups(groups):
    params = [Parameter(torch.zeros(1)) for _ in range(2)]
    named = [*zip(("weight", "bias"), params, strict=True)]
    split = [{"params": [pair]} for pair in named] if groups == 2 else named
    opt = fastopt.torch.SGD(split, lr=1.0, clip_global_norm=1.0)
    for grads in ((3.0, 4.0), (0.3, 0.4), (1.0, np.nan)):
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch.tensor([grad])
        opt.step()
    assert [param.item() for param in params] == pytest.approx([-0.9, -1.2])
    assert (opt.info.skipped, opt.info.non_finite) == (True, ("bias",))
    opt.zero_grad(set_to_none=True)
    opt.step()
    assert (opt.info.stepped, opt.info.skipped) == (False, False)
    assert len(opt.updaters) == groups


@pytest.mark.parametrize("name", ["SGD", "ScheduleFreeSGD", "Muon", "LBSGD"])
def test_both_clips_over_several_groups_are_those_of_one(name):
    """The factor of the clip does not stay in an optimizer, and that of the user does."""
    found = []
    for split in (False, True):
        params = [Parameter(torch.ones(2, 2)) for _ in range(2)]
        options = {"lr": 0.1, "clip_global_norm": 0.1, "clip_adaptive": 0.1}
        groups = [{"params": [each]} for each in params]
        opt = getattr(fastopt.torch, name)(groups if split else params, **options)
        for updater in opt.updaters:
            updater.optimizer.rescale_grad = 0.5
        for scale in (300.0, 3.0):
            params[0].grad = torch.eye(2) * scale
            params[1].grad = torch.tensor([[0.003, 0.0], [0.0, 4.0]])
            opt.step()
            assert {updater.optimizer.rescale_grad for updater in opt.updaters} == {0.5}
        found.append([*params, torch.tensor(opt.info.global_norm)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("bad", ["shape", "lr", "kernel"])
def test_a_clipped_step_that_fails_changes_nothing(bad, monkeypatch):
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1])]}]
    opt = fastopt.torch.Lion(groups, lr=0.1, clip_global_norm=0.1)
    for param in params:
        param.grad = torch.ones(2)
    if bad == "shape":
        params[1].grad.data = torch.ones(3)
    elif bad == "lr":
        opt.param_groups[1]["lr"] = float("nan")
    else:
        monkeypatch.setattr(type(opt.updaters[0]), "__call__", lambda *_: 1 / 0)
    with pytest.raises((ValueError, ZeroDivisionError)):
        opt.step()
    assert [param.tolist() for param in params] == [[1, 1], [1, 1]]
    assert [updater.optimizer.rescale_grad for updater in opt.updaters] == [1, 1]


@pytest.mark.parametrize("options", [{"average": fastopt.EMA(0.5)}, {"name": "ASGD", "t0": 1.0}])
def test_averages_are_in_the_parameters_inside_of_the_context(options):
    param, opt = trained(shape=(1,), **options)
    for _ in range(4):
        param.grad = torch.ones(1)
        opt.step()
    now = param.item()
    with opt.averaged():
        average = param.item()
        with pytest.raises(RuntimeError, match="averages"):
            opt.step()
    assert average > param.item() == now
    copied = copy.deepcopy((param, opt))
    with copied[1].averaged():
        assert copied[0].item() == average


def test_names_of_parameters_are_in_errors():
    net = model()
    opt = fastopt.torch.SGD(net.named_parameters(), lr=0.5)
    away = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(TypeError, match=r"weight is on meta.*model.cpu\(\)"):
        opt.add_param_group({"params": list(away.named_parameters())})
    net[0].weight.data = net[0].weight.data.to(torch.float8_e5m2)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.raises(TypeError, match=r"0.weight has dtype torch.float8_e5m2"):
        opt.step()


def stepped(**change):
    """Make a step with an option of a group that is refused."""
    param, opt = trained(name="Adam")
    opt.param_groups[0].update(change)
    try:
        opt.step()
    finally:
        assert param.tolist() == [1, 1, 1]


T = fastopt.torch
WRONG = [
    (TypeError, "did you mean 'momentum'", lambda p: T.SGD([p], momentun=0.9)),
    (TypeError, "did you mean 'lr'", lambda p: T.Lion([p], learning_rate=0.1)),
    (TypeError, "did you mean 'lr'", lambda p: T.Lion([p], learning_rat=0.1)),
    *((TypeError, "mean 'foreach'", lambda p, k=k: getattr(T, k)([p], foreac=1))
      for k in T.recipes.names()),
    (TypeError, "lr must be a number.*lr_scheduler", lambda p: T.SGD([p], lr=max)),
    (ValueError, "1-element, got .* .2,.", lambda p: T.SGD([p], lr=torch.ones(2))),
    (TypeError, "by position", lambda p: T.Lion([p], 0.1, 0.9)),
    (TypeError, "twice", lambda p: T.SGD([p], 0.1, lr=0.1)),
    (TypeError, "iterable", lambda p: T.SGD(p)),
    (ValueError, "empty", lambda p: T.SGD([])),
    (ValueError, "Invalid learning rate|learning rate", lambda p: T.Adam([p], lr=-1)),
    (ValueError, "capturable", lambda p: T.Adam([p], capturable=True)),
    (ValueError, "differentiable", lambda p: T.Lion([p], differentiable=True)),
    (TypeError, "betas must be 2 num", lambda p: T.Adam([p], betas=(0.9, 0.9, 0.9))),
    (TypeError, "etas must be 2 numbers, got 0.5", lambda p: T.Rprop([p], etas=0.5)),
    (ValueError, "shape .2,., and Muon only supports 2D parameters", lambda p: T.Muon([p])),
    (ValueError, "shape .2, 2, 2., and Muon only supports 2D parameters: .*NorMuon",
     lambda p: T.Muon([torch.ones(2, 2, 2)])),
    (TypeError, "rows or matrices", lambda p: T.SOAP([torch.ones(2, 2) * 1j])),
    (TypeError, "kind must be a class of optimizers", lambda p: T.of(p)),
    (ValueError, "one parameter", lambda p: T.Prodigy([{"params": p}, {"params": []}])),
    (AttributeError, "torch.optim.LBFGS", lambda p: T.LBFGS),
    (AttributeError, "Adagrad", lambda p: T.AdaGrad),
    (AttributeError, "did you mean Adam", lambda p: T.adam),
    (TypeError, "abstract", lambda p: T.Optimizer([p])),
    (TypeError, "int64", lambda p: T.SGD([torch.ones(2, dtype=torch.int64)])),
    (TypeError, r"betas must be 2 numbers, got \(0.9,\)", lambda p: stepped(betas=(0.9,))),
    (TypeError, "lr must be a number, got None", lambda p: stepped(lr=None)),
    (ValueError, "does not support capturable=True", lambda p: stepped(capturable=True)),
    (ValueError, "lr must be a finite number", lambda p: stepped(lr=float("inf"))),
    (TypeError, "weight_decay must be a number, got tensor",
     lambda p: stepped(weight_decay=torch.ones(2))),
    (ValueError, "eps must be a finite number, at least 0, got -1", lambda p: stepped(eps=-1.0)),
    (ValueError, "betas: beta2 must be .* got 1.0", lambda p: stepped(betas=(0.9, 1.0))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "call"), WRONG)
def test_misuse_is_explained(error, match, call):
    with pytest.raises(error, match=match):
        call(Parameter(torch.ones(2)))


MUON = {"ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0)}, {"adjust_lr_fn": "spectral_unclamped"}


@pytest.mark.parametrize("options", MUON)
def test_muon_has_the_options_of_torch(options):

    def run(library):
        param = Parameter(torch.zeros(3, 2))
        try:
            opt = library.Muon([param], lr=0.1, **options)
        except ValueError:
            pytest.skip("newer versions of torch have it")
        for _ in range(2):
            param.grad = torch.arange(6.0).view(3, 2)
            opt.step()
        return param

    check_like_torch(run, rtol=0.02, atol=2e-3)  # torch computes in bfloat16


@pytest.mark.parametrize(
    ("name", "options"), [*CASES, ("SGD", {"momentum": 0.9, "nesterov": True})]
)
def test_complex_parameters_are_pairs_of_real_numbers(name, options):

    def run(library):
        torch.manual_seed(1)
        param = Parameter(torch.randn(3, 2, dtype=torch.complex64))
        opt = getattr(library, name)([param], **{"lr": 0.1, **options})
        for step in range(4):
            state = saved(opt)
            opt = getattr(library, name)([param], **{"lr": 0.1, **options})
            opt.load_state_dict(state)
            param.grad = torch.randn(3, 2, dtype=torch.complex64)
            if step == 2:
                grad = param.grad.conj()  # torch cannot update with it
                param.grad = grad if library is fastopt.torch else grad.resolve_conj()
            opt.step()
        return [param, opt.state[param]]

    check_like_torch(run, check_dtype=False)


def test_the_examples_of_the_package_run():
    for module in pkgutil.iter_modules(fastopt.torch.__path__, "fastopt.torch."):
        assert doctest.testmod(importlib.import_module(module.name)).failed == 0
    assert doctest.testmod(fastopt.torch).failed == 0


def test_the_page_runs_and_prints_what_it_says(capsys):
    page, namespace = ROOT / "docs" / "torch.md", {}
    for line, code in blocks(page, "python"):
        capsys.readouterr()
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
        assert capsys.readouterr().out.splitlines() == printed(code)


@fastopt.rule(state=("mom",), hyper=("lr", "momentum"))
def heavy(weight, grad, state, h):
    mom = h.momentum * state[0] + grad
    return weight - h.lr * mom, (mom,)


class OwnHeavy(fastopt.optimizer.Optimizer):
    """A class of the user's."""

    rule = heavy
    momentum: float = arg(default=0.9, check=Real(least=0))


class Again(OwnHeavy):
    """Its next version, with the same name."""

    momentum: float = arg(default=0.5)


def test_a_registered_class_of_the_users_has_one_for_torch(registries):
    with pytest.raises(AttributeError, match="no attribute 'OwnHeavy'"):
        _ = fastopt.torch.OwnHeavy
    fastopt.optimizer.register(OwnHeavy)
    found = []
    for kind in (torch.optim.SGD, fastopt.torch.OwnHeavy):
        net = model()
        found.append(losses(net, kind(net.parameters(), 0.1, momentum=0.9)))
    np.testing.assert_allclose(*found, rtol=1e-5)
    own = fastopt.torch.of(OwnHeavy)(net.parameters(), lr=0.1)
    again = pickle.loads(pickle.dumps(own))
    assert (type(again), again.param_groups[0]["lr"]) == (type(own), 0.1)
    assert pickle.loads(pickle.dumps(kind)) is kind
    Again.__name__ = "OwnHeavy"
    with pytest.warns(UserWarning, match="replaces"):
        fastopt.optimizer.register(Again)
    assert fastopt.torch.OwnHeavy(net.parameters()).defaults["momentum"] == 0.5


UPDATES = 20
FACTOR = {"factor": 0.5, "base_lr": 0.4}
TAIL = {"final_lr": 0.1, "base_lr": 0.4}
SCHEDULES = {
    "StepLR": ((7, 0.5), 0, ours.FactorScheduler(7, **FACTOR)),
    "MultiStepLR": (([5, 12], 0.5), 0, ours.MultiFactorScheduler([5, 12], **FACTOR)),
    "ExponentialLR": ((0.9,), 1, ours.ExponentialScheduler(1, factor=0.9, base_lr=0.4)),
    "PolynomialLR": ((15, 2.0), 1, ours.PolyScheduler(max_update=15, pwr=2, base_lr=0.4)),
    "CosineAnnealingLR": ((UPDATES, 0.1), 1, ours.CosineScheduler(max_update=UPDATES, **TAIL)),
    "CosineAnnealingWarmRestarts":
        ((4, 2, 0.1), 1, ours.CosineRestartsScheduler(period=4, period_mult=2, **TAIL)),
    "OneCycleLR": ((0.4, 21), 1, ours.OneCycleScheduler(
        max_update=20, pct_start=(0.3 * 21 - 1) / 20, final_div_factor=1e4, base_lr=0.4)),
}  # fmt: skip
"""Those of docs/coming-from.md: torch's arguments, how many updates it is ahead, and ours."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_the_learning_rates_of_torch(name):
    arguments, ahead, schedule = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.4)
    their = getattr(lr_scheduler, name)(optimizer, *arguments)
    for update in range(1, UPDATES + 1):
        assert schedule(update - ahead) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        their.step()


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_a_plateau_reduces_at_the_metrics_of_torch(threshold):
    options = {"patience": 2, "factor": 0.5, "threshold": threshold, "threshold_mode": "abs"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.4)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    own = ours.PlateauScheduler(patience=3, min_delta=threshold, **FACTOR)
    for loss in [1, 0.9, 0.9, 0.88, 0.91, 0.8, *[0.78] * 9, 0.5, *[0.5] * 4]:
        schedule.step(loss)
        own.step(loss)
        assert own(1) == optimizer.param_groups[0]["lr"]


def test_a_schedule_may_pass_values_that_nothing_is_updated_with():
    weight, opt = trained(shape=(1,), name="Adam", lr=0.1)
    opt.param_groups[0]["betas"] = (22.0, 0.999)
    grad, weight.grad = weight.grad, None
    opt.step()
    weight.grad = grad
    with pytest.raises(ValueError, match=r"beta1 must be .* below 1, got 22\.0"):
        opt.step()
    opt.param_groups[0]["betas"] = (0.9, 0.999)
    opt.step()
    assert weight.item() == pytest.approx(0.9)

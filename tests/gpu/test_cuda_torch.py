"""torch's tensors on a GPU."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels.devices import header
from helpers.device_arrays import on_device

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch cannot use the GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu


class Tensor(torch.Tensor):
    """A tensor that torch takes for one on a device."""

    is_cuda = True


def tensor(values, dtype="float32", **kwargs):
    made = torch.tensor(values, dtype=getattr(torch, dtype), device="cuda")
    return made.requires_grad_(**kwargs) if kwargs else made


def numbers(tensor):
    return tensor.detach().float().cpu().numpy()


def test_a_tensor_that_requires_a_gradient_is_updated_in_place():
    weight, updater = tensor([1.0, 2.0], requires_grad=True), optimizer.get_updater(optimizer.SGD())
    for _ in range(2):
        updater(0, tensor([1.0, 10.0]), weight)
    np.testing.assert_allclose(numbers(weight), [0.98, 1.8], rtol=1e-6)
    assert weight.requires_grad


def test_a_transposed_tensor_is_updated_in_place():
    memory = tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    updater(0, tensor([[1.0, 2.0], [1.0, 2.0]]), memory.t()[:2])
    np.testing.assert_array_equal(numbers(memory), [[0, 1, 3], [2, 3, 6]])


def test_bfloat16_tensors_have_masters(bfloat16):
    weight = tensor([1.0, 2.0], "bfloat16")
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=0.5, multi_precision=True))
    updater(0, tensor([1.0, 1.0], "bfloat16"), weight)
    np.testing.assert_array_equal(numbers(weight), [0.5, 1.5])
    assert header(weight).dtype == bfloat16


def test_sparse_tensors_are_refused_and_their_parts_taken():
    class Sparse(Tensor):
        layout = torch.sparse_coo

    sparse = torch.ones(4, 2).as_subclass(Sparse)
    weight, updater = tensor(np.ones((4, 2))), optimizer.get_updater(optimizer.Test())
    with pytest.raises(TypeError, match=r"index 0: gradient: .*sparse tensors are given as a pair"):
        updater(0, sparse, weight)
    updater(0, (tensor(np.ones((2, 2))), tensor([3, 1], "int64")), weight)
    np.testing.assert_array_equal(numbers(weight)[:, 0], [1, 2, 1, 2])


def test_tensors_in_main_memory_are_no_device_arrays():
    with pytest.raises(ValueError, match=r"weight is on cuda\(0\), gradient on the host"):
        optimizer.get_updater(optimizer.SGD())(0, torch.ones(3), on_device(np.ones(3, np.float32)))


def test_torch_refuses_graphs_that_saved_the_weight_before_an_update():
    weight, updater = tensor([1.0, 2.0], requires_grad=True), optimizer.get_updater(optimizer.SGD())
    for _ in range(3):  # the first call makes the record
        loss = (weight * weight).sum()
        before = weight._version
        updater(0, tensor([1.0, 1.0]), weight)
        assert weight._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_lazily_negated_tensor_is_refused():
    class Negated(Tensor):
        def is_neg(self):
            return True

    weight, updater = tensor([1.0]), optimizer.get_updater(optimizer.SGD())
    updater(0, tensor([1.0]), weight)
    with pytest.raises(TypeError, match=r"index 0: gradient: .*lazily negated"):
        updater(0, torch.ones(1).as_subclass(Negated), weight)


class Step:
    """What torch's GradScaler needs of an optimizer, as in the page about CUDA."""

    def __init__(self, updater, params):
        self.updater, self.params = updater, params
        self.param_groups = [{"params": params}]

    def step(self):
        indices = list(range(len(self.params)))
        grads = [p.grad for p in self.params]
        self.updater(indices, grads, self.params)


def test_grad_scaler_unscales_and_skips_steps():
    """Steps with an overflow are skipped; the others are those of unscaled gradients."""
    weight = tensor([1.0, 2.0], requires_grad=True)
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=0.5))
    step, scaler = Step(updater, [weight]), torch.amp.GradScaler("cuda", init_scale=1024.0)
    expected = np.array([1.0, 2.0])
    for factor in (1.0, np.inf, 0.25):
        scale = scaler.get_scale()
        weight.grad = None
        scaler.scale((weight * factor).sum()).backward()
        assert factor == np.inf or float(weight.grad[0]) == factor * scale
        scaler.unscale_(step)
        scaler.step(step)
        scaler.update()
        expected = expected if factor == np.inf else expected - 0.5 * factor
        np.testing.assert_allclose(numbers(weight), expected)
    assert scaler.get_scale() == 512
    assert updater.optimizer.num_update == 2


def test_state_may_be_allocated_by_torch():
    weight, expected = tensor([1.0, 2.0]), tensor([1.0, 2.0])
    updater, other = optimizer.get_updater("adam"), optimizer.get_updater("adam")
    mean, var = (torch.zeros_like(weight) for _ in range(2))
    updater.states[0] = mean, var
    for _ in range(3):
        updater(0, tensor([1.0, 10.0]), weight)
        other(0, tensor([1.0, 10.0]), expected)
    np.testing.assert_array_equal(numbers(weight), numbers(expected))
    np.testing.assert_allclose(numbers(mean), [0.271, 2.71], rtol=1e-6)
    assert updater.states[0][0] is mean


def test_state_is_in_the_memory_of_torch(bfloat16):
    before = torch.cuda.memory_allocated()
    weight, grad = (torch.ones(10**6, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    updater = optimizer.get_updater(optimizer.Adam(multi_precision=True))
    updater(0, grad, weight)
    arrays = 2 * weight.nbytes
    assert torch.cuda.memory_allocated() - before >= arrays + 3 * 4 * 10**6
    loaded = optimizer.get_updater(optimizer.Adam(multi_precision=True))
    loaded.set_states(updater.get_states())
    loaded(0, grad, weight)
    assert torch.cuda.memory_allocated() - before >= arrays + 6 * 4 * 10**6


def test_an_update_runs_after_the_work_on_its_stream():
    """The side stream and the default stream do not wait for each other."""
    weight, grad = (torch.zeros(10**6, device="cuda") for _ in range(2))
    updater, side = optimizer.get_updater(optimizer.SGD(learning_rate=1.0)), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.cuda._sleep(10**7)
            grad.add_(1)
            updater(0, grad, weight)
            grad.mul_(2)
    side.synchronize()
    assert (weight == -(1 + 3 + 7)).all()


def test_a_graph_of_torch_computes_gradients_and_steps():
    """The first call allocates, so that a capture refuses it; a replay computes and updates."""
    weight, grad = (torch.zeros(9, device="cuda") for _ in range(2))
    updater, graph = optimizer.get_updater(optimizer.SGD(learning_rate=1.0)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        grad.add_(1)
        with pytest.raises(RuntimeError, match="is being captured for a CUDA graph"):
            updater([0], [grad], [weight])
    assert updater.optimizer.num_update == 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            updater([0], [grad], [weight])
    with torch.cuda.graph(graph, stream=stream):
        grad.add_(1)
        updater([0], [grad], [weight])
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert (weight == -(1 + 2 + 3)).all()
    assert updater.optimizer.num_update == 5

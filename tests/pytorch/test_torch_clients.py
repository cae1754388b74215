"""fastopt.torch in programs that take the class or the object of an optimizer."""

import logging

import numpy as np
import pytest
import torch

import fastopt.torch
from fastopt.torch.recipes import OF_TORCH, names
from helpers.cases import OF_MATRICES

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


WITHOUT_VECTORS = {*OF_MATRICES, "groupadagrad"}
every_class = pytest.mark.parametrize("name", names())


def tensors(module):
    return [param.detach().clone() for param in module.parameters()]


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in names() if name.lower() not in WITHOUT_VECTORS])
def test_stable_baselines_trains_a_policy_and_saves_and_loads_the_state(name, tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    options = {"seed": 0, "n_steps": 32, "batch_size": 32, "n_epochs": 1, "device": "cpu"}
    options["learning_rate"] = lambda left: 1e-3 * left

    def learned(kind):
        policy = {"optimizer_class": kind, "optimizer_kwargs": {}}  # else it sets torch's epsilon
        return sb3.PPO("MlpPolicy", "CartPole-v1", policy_kwargs=policy, **options).learn(64)

    model = learned(getattr(fastopt.torch, name))
    if name in {*OF_TORCH} - {"SparseAdam"}:  # for rows alone
        close(tensors(model.policy), tensors(learned(getattr(torch.optim, name)).policy))
    model.save(tmp_path / "model")
    loaded = sb3.PPO.load(tmp_path / "model")
    states = [each.policy.optimizer.state_dict()["state"] for each in (model, loaded)]
    assert len(states[0]) == (0 if name == "SGD" else 12)  # without momentum it has none
    torch.testing.assert_close(states[1], states[0])


class Regression(torch.nn.Module):
    """A model with the interface of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, x, labels):
        output = self.layers(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


class Matrix(Regression):
    """A model of one matrix, for optimizers that take no vectors."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Linear(3, 1, bias=False)


def model_of(name):
    """Class of a model that an optimizer can train."""
    return Matrix if name.lower() in WITHOUT_VECTORS else Regression


def examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3)).astype(np.float32)
    return [{"x": each, "labels": each[:1] - 2 * each[1:2]} for each in x]


ONE_GROUP = {"Prodigy", "DAdaptAdam", "ScheduleFreeProdigy"}
"""Classes with a number of all parameters."""


def trained(run, name, path):
    """Return parameters of a run of 4 steps, and of 2 that continue after 2 and a checkpoint.

    Those of a class that torch has too are close to torch's.
    """
    kind, options = getattr(fastopt.torch, name), {"momentum": 0.9} if name == "SGD" else {}
    found = [tensors(run(kind, options, *steps, path)) for steps in ((0, 4), (0, 2), (2, 4))]
    assert not any(map(torch.equal, found[0], tensors(model_of(name)())))
    if name in {*OF_TORCH} - {"Muon", "SparseAdam"}:  # in bfloat16, for rows alone
        (of_torch := path / "torch").mkdir()
        close(found[0], tensors(run(getattr(torch.optim, name), options, 0, 4, of_torch)))
    return found[0], found[2]


def by_transformers(kind, options, start, steps, path):
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = transformers.TrainingArguments(
        str(path / "of_trainer"),
        max_steps=steps,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        save_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = transformers.Trainer(
        model_of(kind.__name__)(),
        args,
        train_dataset=examples(),
        optimizer_cls_and_kwargs=(kind, {"lr": 0.02, **options}),
    )
    last = str(path / "of_trainer" / f"checkpoint-{start}") if start else None
    trainer.train(resume_from_checkpoint=last)
    return trainer.model


def by_lightning(kind, options, start, steps, path):
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model_of(kind.__name__)()

        def training_step(self, batch):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            opt = kind(self.parameters(), lr=0.02, **options)
            schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    shown = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(
        max_epochs=steps // 2,
        accelerator="cpu",
        enable_checkpointing=False,
        gradient_clip_val=0.5,
        **shown,
    )
    module, last = Module(), path / "of_lightning.ckpt"
    loader = torch.utils.data.DataLoader(examples(), batch_size=16)
    trainer.fit(module, loader, ckpt_path=last if start else None)
    trainer.save_checkpoint(last)
    return module.net


def by_accelerate(kind, options, start, steps, path):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    net = model_of(kind.__name__)()
    opt = kind(net.parameters(), lr=0.02, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    loader = torch.utils.data.DataLoader(examples(), batch_size=8)
    net, opt, loader, schedule = accelerator.prepare(net, opt, loader, schedule)
    if start:
        accelerator.load_state(str(path / "of_accelerate"))
    for batch in [*loader][start:steps]:
        opt.zero_grad()
        accelerator.backward(net(**batch)["loss"])
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        schedule.step()
    accelerator.save_state(str(path / "of_accelerate"))
    return accelerator.unwrap_model(net)


def by_ignite(kind, options, start, steps, path):
    pytest.importorskip("ignite")
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    net = model_of(kind.__name__)()
    opt = kind(net.parameters(), lr=0.02, **options)

    def update(_, batch):
        opt.zero_grad()
        net(**batch)["loss"].backward()
        opt.step()

    trainer = Engine(update)
    objects = {"net": net, "opt": opt}
    saver = DiskSaver(str(path / "of_ignite"), require_empty=False)
    trainer.add_event_handler(Events.COMPLETED, Checkpoint(objects, saver, n_saved=None))
    loader = torch.utils.data.DataLoader(examples(), batch_size=8)
    if start:
        saved = torch.load(path / "of_ignite" / f"checkpoint_{start}.pt", weights_only=True)
        Checkpoint.load_objects(objects, saved)
    trainer.run([*loader][start:steps])
    return net


def by_skorch(kind, options, start, steps, path):
    skorch = pytest.importorskip("skorch")

    class Net(skorch.NeuralNetRegressor):
        def get_loss(self, output, target, **_):
            return output["loss"]

    net = Net(
        model_of(kind.__name__),
        optimizer=kind,
        lr=0.02,
        **{f"optimizer__{name}": value for name, value in options.items()},
        batch_size=-1,
        train_split=None,
        verbose=0,
    ).initialize()
    files = {f"f_{part}": str(path / part) for part in ("params", "optimizer")}
    if start:
        net.load_params(**files)
    rows = examples()
    data = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    net.partial_fit(data, data["labels"], classes=None, epochs=steps - start)
    net.save_params(**files)
    return net.module_


@pytest.mark.parametrize(
    "run", [by_transformers, by_lightning, by_accelerate, by_ignite, by_skorch]
)
@every_class
def test_libraries_save_and_resume_with_the_same_bits(run, name, tmp_path):
    if run is by_transformers and name in ONE_GROUP:
        with pytest.raises(ValueError, match="one learning rate for all parameters"):
            trained(run, name, tmp_path)  # it makes a group of the biases
        return
    whole, resumed = trained(run, name, tmp_path)
    assert all(map(torch.equal, whole, resumed))


@every_class
def test_states_go_through_distributed_checkpoints(name, tmp_path):
    """By names of parameters, into the state of an optimizer that has made no step."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as checkpoints

    def step(net, opt):
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        opt.step()

    runs = []
    for _ in range(2):
        net = model_of(name)()
        runs.append((net, getattr(fastopt.torch, name)(net.parameters(), lr=0.1)))
    (net, opt), (other, loaded) = runs
    step(net, opt)
    saved = checkpoints.get_optimizer_state_dict(net, opt)
    assert {*saved["state"]} == {key for key, _ in net.named_parameters() if opt.state}
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    read = checkpoints.get_optimizer_state_dict(other, loaded)
    checkpoint.load(read, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(net.state_dict())
    checkpoints.set_optimizer_state_dict(other, loaded, read)
    for pair in runs:
        step(*pair)
    assert all(map(torch.equal, net.parameters(), other.parameters()))

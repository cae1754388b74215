"""What to write instead of the names that other libraries have, as data.

``*_NAMES`` has argument names, and the names to suggest for them; ``*_ARGUMENTS`` advice for
arguments that have no counterpart; ``*_ATTRIBUTES`` advice for methods and attributes. Tests:
``tests/test_suggestions.py``.
"""

# The package

PACKAGE = {
    "optim": "optimizer is the module of optimizers",
    "optimizers": "optimizer is the module of optimizers",
    "lr_schedulers": "lr_scheduler is the module of schedules",
    "SGDMomentum": "SGD(lr=..., momentum=...) has momentum",
    "Momentum": "SGD(lr=..., momentum=...) has momentum",
    "Tiger": "Signum(momentum=0.965, wd_lh=0.01) has its formula, with one learning rate",
    "Grams": "AdamW(formula='torch', grams=True) has its formula",
    "SPAM": "StableSPAM limits spikes of the gradient and restarts its moments",
    "AdamC": "AdamW(formula='torch', corrected_decay=the largest learning rate) has its formula",
    "SGDW": "SGD(decouple=True) has its formula",
    **dict.fromkeys(("MatrixOptimizer", "orthogonalize"), "it is in fastopt.optimizer"),
    "Nesterov": "NAG has Nesterov's momentum",
    "SparseAdam": "Adam updates the indexed rows alone where gradients are row-sparse",
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_by_global_norm"),
        "Updater(optimizer, clip_global_norm=1.0) clips the norm of all gradients",
    ),
    "apply_updates": "updater.updated(grads, params) returns the new params",
    "chain": "clips, averages and accumulation are arguments of Updater, decay those of optimizers",
    **{
        name: f"it is a module: import fastopt.{name}"
        for name in ("adapters", "distributed", "mpi", "torch")
    },
    "load": "an Updater and a ParameterDict have load()",
    "save": "an Updater and a ParameterDict have save()",
}

# Optimizers

OPTIMIZER_NAMES = {
    **dict.fromkeys(("step_size", "learn_rate", "learning_rate_init", "alpha"), ("learning_rate",)),
    **dict.fromkeys(("b1", "beta_1"), ("beta1",)),
    **dict.fromkeys(("b2", "beta_2"), ("beta2",)),
    **dict.fromkeys(("L2", "l2", "weight_decay_rate", "lambda_"), ("wd",)),
    **dict.fromkeys(("schedule", "scheduler", "lr_schedule"), ("lr_scheduler",)),
    **dict.fromkeys(("clipvalue", "clip_value", "max_delta"), ("clip_gradient",)),
    **dict.fromkeys(("mass", "mu", "decay_rate"), ("momentum", "gamma1")),
    "alpha": ("gamma1", "learning_rate"),
    "rho": ("gamma1",),
    "momentum": ("beta1", "gamma2"),
    "momentum_decay": ("schedule_decay",),
    "corrected_weight_decay": ("corrected_decay",),
    "decoupled_weight_decay": ("decouple",),
    "adam_epsilon": ("epsilon",),
    "names": ("param_idx2name",),
    "random_state": ("seed",),
    "freeze": ("frozen",),
}

LIMITS = ("clip_adaptive", "clip_global_norm", "loss_scaler")

CLIPS = "Updater(optimizer, clip_global_norm=...) limits the norm of all gradients together"

AUTOMATIC = "updates are always compiled, also those of lists, so there is nothing to choose"

OPTIMIZER_ARGUMENTS = {
    **dict.fromkeys(
        ("params", "parameters", "weights", "model"),
        "weights go to each call of an updater: Updater(optimizer)(index, grad, weight); "
        "fastopt.torch has optimizers for models of torch",
    ),
    **dict.fromkeys(
        ("fun", "x0", "args", "jac", "hess", "hessp", "constraints"),
        "scipy.optimize.minimize takes method=fastopt.scipy_method(optimizer)",
    ),
    **dict.fromkeys(("clipnorm", "global_clipnorm", "max_norm", "max_grad_norm"), CLIPS),
    **dict.fromkeys(("grad_clip", "grad_clip_norm", "clip_norm"), CLIPS),
    **dict.fromkeys(("foreach", "fused", "capturable", "jit_compile"), AUTOMATIC),
    **{
        name: f"it is an argument of an updater: Updater(optimizer, {name}=...)"
        for name in ("groups", "accumulate", "average", *LIMITS)
    },
    **dict.fromkeys(
        ("use_ema", "ema_momentum", "ema_decay", "ema_overwrite_frequency"),
        "Updater(optimizer, average=EMA(decay=...)) averages the weights",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "every_k_schedule", "accumulation_steps"),
        "Updater(optimizer, accumulate=n) averages the gradients of n calls",
    ),
    "loss_scale_factor": "Updater(optimizer, loss_scaler=LossScaler(...)) scales gradients back",
    **dict.fromkeys(
        ("requires_grad", "trainable"),
        "Updater(optimizer, groups={pattern: {'frozen': True}}) leaves weights alone",
    ),
    "amsgrad": "Adam, AdamW, NAdamW and Nadam have AMSGrad",
    "nesterov": "NAG is SGD with Nesterov's momentum, and Nadam is Adam with it",
    "dampening": "SGD with formula='torch' has it; with NAG the gradient is not damped",
    "differentiable": "there is no automatic differentiation",
    "decoupled_weight_decay": "AdamW is Adam with decoupled decay; SGD and Nadam have decouple",
    "lr_decay": "a schedule is the learning rate: lr=FactorScheduler(...) of fastopt.lr_scheduler",
    "warmup_steps": "a schedule has the warm-up: lr=CosineScheduler(..., warmup_steps=...)",
    "initial_accumulator_value": "AdaGrad and RMSProp have it; sums of other classes start at 0",
    "eps_root": "epsilon is beside the root or inside it, see formula and docs/formulas.md",
    "formula": "this class has one formula; Adam, AdamW, AdaGrad, RMSProp, Nadam and SGD have two",
}

STEPS = "an optimizer is called by an updater: Updater(optimizer)(index, grad, weight)"

LIBRARIES = (
    "fastopt.scipy_method(optimizer) is for SciPy, fastopt.adapters.ThincOptimizer(optimizer) for "
    "thinc"
)

STATES = "an updater has the states: Updater(optimizer).state_dict()"

OPTIMIZER_ATTRIBUTES = {
    **dict.fromkeys(("step", "apply_gradients", "apply", "build"), STEPS),
    "init": "fastopt.functional(optimizer) returns init and update",
    "minimize": "fastopt.minimize(fun, x0, optimizer=optimizer) minimizes a function",
    **dict.fromkeys(("states", "save", "load", "get_states", "set_states"), STATES),
    **dict.fromkeys(("state_dict", "load_state_dict", "state"), STATES),
    "zero_grad": "gradients are arguments of each call, so there are none to set to zero",
    "weight_decay": "wd is the weight decay",
    "betas": "each rate is an attribute: beta1, beta2",
    **dict.fromkeys(
        ("param_groups", "add_param_group"),
        "Updater(optimizer, groups={pattern: {name: value}}) has groups of parameters",
    ),
}

# Updaters

HYPER_PARAMETERS = (
    *("learning_rate", "lr", "momentum", "wd", "weight_decay", "betas", "beta1", "beta2", "eps"),
    *("epsilon", "lr_scheduler", "clip_gradient", "rescale_grad", "multi_precision"),
)
"""Arguments of optimizers that are often passed to an updater by mistake."""

UPDATER_ATTRIBUTES = {
    **dict.fromkeys(
        ("update", "apply_gradients", "apply", "minimize"),
        "updater.step(grads, weights) updates nested weights, updater(index, grad, weight) "
        "an array or lists",
    ),
    **dict.fromkeys(("init", "build"), "states are created at the first update of an index"),
    "zero_grad": "gradients are arguments of each call, so there are none to set to zero",
    "param_groups": "updater.optimizer has the hyper-parameters, updater.groups those of "
    "groups of weights",
    "add_param_group": "a weight is new with its first update; assign updater.groups to "
    "change groups",
    "state": "updater.states has the state of each index",
    "lr": "updater.optimizer.learning_rate is the rate",
    "learning_rate": "updater.optimizer.learning_rate is the rate",
    "set_learning_rate": "updater.optimizer.set_learning_rate() sets the rate",
    "compute_gradients": "gradients are computed by your code, and passed to the call",
}

UPDATER_NAMES = {
    **dict.fromkeys(("clip_norm", "max_norm", "max_grad_norm"), ("clip_global_norm",)),
    **dict.fromkeys(("scaler", "grad_scaler"), ("loss_scaler",)),
    **dict.fromkeys(("ema", "use_ema", "ema_decay"), ("average",)),
    **dict.fromkeys(("accumulation_steps", "gradient_accumulation_steps"), ("accumulate",)),
    "param_groups": ("groups",),
}

UPDATER_ARGUMENTS = dict.fromkeys(
    HYPER_PARAMETERS, "it is an argument of the optimizer: optimizer.create(name, ...)"
)

TRAINER_ATTRIBUTES = {
    "zero_grad": "ParameterDict.zero_grad() zeroes gradients; every step needs new ones anyway",
    "state_dict": "trainer.updater.state_dict() returns the states, save_states() writes them",
    "load_state_dict": "trainer.updater.load_state_dict() takes them, load_states() reads them",
    "param_groups": "a Parameter has lr_mult and wd_mult",
    "fit": "the loop is yours: compute gradients, add_grad() them, and call step()",
}

TRAINER_ARGUMENTS = {
    **dict.fromkeys(HYPER_PARAMETERS, "optimizer_params={name: value} takes it"),
    **dict.fromkeys(
        ("kvstore", "update_on_kvstore", "compression_params"),
        "comm takes a communicator of mpi4py or a process group of torch",
    ),
    **dict.fromkeys(
        ("groups", "accumulate", "average", "clip_adaptive"),
        "make an Updater(optimizer, ...) with it and pass that as comm",
    ),
}

RANKS_ATTRIBUTES = {
    **UPDATER_ATTRIBUTES,
    **dict.fromkeys(
        ("update", "apply_gradients", "apply", "minimize"),
        "call the updater: updater(index, grad, weight), also with lists of them, or "
        "updater.step(grads, weights)",
    ),
    **dict.fromkeys(
        ("param_groups", "add_param_group", "groups"),
        "updater.optimizer has the hyper-parameters; its set_lr_mult() and set_wd_mult() set "
        "those of single parameters, and the argument groups of ShardedUpdater those of groups",
    ),
}

RANKS_NAMES = {
    **UPDATER_NAMES,
    **dict.fromkeys(("communicator", "ranks", "process_group"), ("comm",)),
    **dict.fromkeys(("bucket_size", "bucket_cap_mb"), ("bucket_bytes",)),
}

RANKS_ARGUMENTS = {
    **UPDATER_ARGUMENTS,
    **dict.fromkeys(
        ("groups", "accumulate", "average", "clip_adaptive"),
        "it is an argument of ShardedUpdater and of Updater",
    ),
}


# Settings

SCALER_ATTRIBUTES = {
    "step": "Updater(optimizer, loss_scaler=scaler) skips steps and updates the scale",
    "unscale_": "Updater(optimizer, loss_scaler=scaler) divides the gradients by the scale",
    "get_scale": "the attribute scale is the scale",
}

SCHEDULE_NAMES = {
    **dict.fromkeys(("T_max", "total_steps", "total_iters", "decay_steps"), ("max_update",)),
    **dict.fromkeys(
        ("eta_min", "alpha", "end_value", "end_lr", "end_learning_rate"), ("final_lr",)
    ),
    **dict.fromkeys(("lr", "learning_rate", "initial_learning_rate", "init_value"), ("base_lr",)),
    **dict.fromkeys(("max_lr", "peak_value"), ("base_lr",)),
    **dict.fromkeys(("gamma", "decay_rate"), ("factor",)),
    **dict.fromkeys(("step_size", "milestones", "transition_steps"), ("step",)),
    **dict.fromkeys(("T_0", "first_decay_steps"), ("period",)),
    **dict.fromkeys(("T_mult", "t_mul"), ("period_mult",)),
    "power": ("pwr",),
    "min_lr": ("stop_factor_lr", "final_lr"),
    "threshold": ("min_delta",),
    "num_decay_steps": ("cooldown_steps",),
    "decay_type": ("cooldown",),
    "num_training_steps": ("max_update",),
    "warmup": ("warmup_steps",),
    "num_warmup_steps": ("warmup_steps",),
    "warmup_iters": ("warmup_steps",),
    "schedulers": ("schedules",),
}

SCHEDULE_ARGUMENTS = {
    "optimizer": "a schedule needs no optimizer: fastopt.Adam(lr=schedule) takes it",
    "num_stable_steps": "max_update is the sum of warm-up, plateau and cool-down",
    "min_lr_ratio": "final_lr is a learning rate: the ratio times base_lr",
    "last_epoch": "updates are counted by the optimizer, from its begin_num_update",
}

SCHEDULE_ATTRIBUTES = {
    "step": "updates are counted by the optimizer, which calls the schedule; only a "
    "PlateauScheduler has step(metric)",
    **dict.fromkeys(
        ("get_last_lr", "get_lr"),
        "the current learning rate is optimizer.learning_rate, that of update n is schedule(n)",
    ),
    "state_dict": "updater.save() saves the schedule together with the states",
    "load_state_dict": "updater.load() restores the schedule together with the states",
}

EMA_NAMES = dict.fromkeys(("beta", "momentum", "ema_momentum", "ema_decay"), ("decay",))

SWA_NAMES = {
    **dict.fromkeys(("begin", "swa_start", "start_averaging"), ("start",)),
    **dict.fromkeys(("freq", "swa_freq", "update_freq", "period", "average_period"), ("every",)),
}

LOOKAHEAD_NAMES = {
    **dict.fromkeys(("sync_period", "la_steps", "period", "every"), ("k",)),
    **dict.fromkeys(("slow_step_size", "la_alpha"), ("alpha",)),
}


# Tables, parameters and initializers

TABLE_ATTRIBUTES = {
    **dict.fromkeys(("pull", "forward", "get", "embed"), "lookup(ids) returns the rows of ids"),
    **dict.fromkeys(("push", "backward", "apply"), "update(ids, grads) updates rows"),
    **dict.fromkeys(("keys", "items"), "ids() has the ids, to_arrays() ids and rows"),
}

RANKS_TABLE_ATTRIBUTES = {
    **TABLE_ATTRIBUTES,
    **dict.fromkeys(
        ("ids", "rows", "weight", "counts", "last_used", "to_arrays", "prefetch", "close"),
        "the attribute table has it for the rows of this rank",
    ),
}

PARAMETER_NAMES = {"initializer": ("init",)}

PARAMETER_ARGUMENTS = dict.fromkeys(
    ("requires_grad", "trainable"), "grad_req='null' is for parameters that are not trained"
)

INITIALIZERS = {
    "he": "he_normal",
    "kaiming": "he_normal",
    "kaiming_normal": "he_normal",
    "kaiming_uniform": "he_uniform",
    "kaimingnormal": "he_normal",
    "kaiminguniform": "he_uniform",
    "glorot": "glorot_uniform",
    "lecun": "lecun_normal",
    "xavier_normal": "glorot_normal",
    "xavier_uniform": "glorot_uniform",
    "trunc_normal": "truncated_normal",
}
"""Names of other libraries, in lower case, and the names to suggest for them."""

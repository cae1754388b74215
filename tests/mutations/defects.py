"""Defects for ``run.py``: a module, its text, the text of the defect, and tests that catch it."""

__all__ = ["DEFECTS"]

GOLDEN = "tests/optimizer/test_golden.py -k adam"
RECORDED = "tests/optimizer/test_recorded.py"
SCHEDULES = "tests/lr_scheduler/test_schedules.py"
MATRICES = "tests/optimizer/test_packages.py"
CONTAINER = "checkpoint/format/container.py"
RANKS = "tests/distributed/test_threads.py -k plans-3"
PROMISES = "tests/optimizer/test_promises.py"
FORMS = f"{PROMISES} -k plain_form"
FILES = "tests/checkpoint/test_damage.py tests/checkpoint/test_contents.py"

DEFECTS = [
    # formulas
    ("kernels/scalars.py", "        return -bound", "        return bound", GOLDEN),
    ("kernels/scalars.py", "one_minus_beta2 * grad * grad", "one_minus_beta2 * grad", GOLDEN),
    ("kernels/scalars.py", "not var <= peak", "var <= peak", RECORDED),
    ("kernels/scalars.py", "grad, h) + h.wd * weight", "grad, h) - h.wd * weight", RECORDED),
    ("optimizer/adam.py", "root / (1 - h.beta1**t)", "root / (1 - h.beta1)", GOLDEN),
    # optimizers of matrices
    ("_kernels/factored.py", "lower(before[j], cover)", "larger(before[j], cover)", MATRICES),
    ("optimizer/rowsteps.py", "if self.momentum else", "if not self.momentum else", MATRICES),
    (
        "_kernels/factored.py",
        "(total(lanes[:1])[0] / width - rows[b, i]) * share",
        "total(lanes[:1])[0] / width * share",
        MATRICES,
    ),
    ("optimizer/muon.py", "0.2 * math.sqrt(max(", "0.2 * math.sqrt(min(", MATRICES),
    ("optimizer/muon.py", "if sum(sizes) != rows:", "if sum(sizes) > rows:", MATRICES),
    ("optimizer/shampoo.py", "1 - self.beta2**count", "1.0", MATRICES),
    ("optimizer/shampoo.py", "decays_last = True", "decays_last = False", MATRICES),
    # schedules and averages
    (
        "lr_scheduler/factor.py",
        "(num_update - 1) // self.step",
        "num_update // self.step",
        SCHEDULES,
    ),
    ("lr_scheduler/factor.py", "bisect_left(self.step, num_update)", "len(self.step)", SCHEDULES),
    ("lr_scheduler/factor.py", "1 if self.mode ==", "1 if self.mode !=", SCHEDULES),
    ("lr_scheduler/annealing.py", "math.pow(1 - done,", "math.pow(done,", SCHEDULES),
    ("averages.py", "self.decay ** max(t, 1)", "self.decay ** max(t, 2)", "tests/test_averages.py"),
    (
        "averages.py",
        "0.0 if t % self.k else",
        "0.0 if t % (self.k + 1) else",
        "tests/test_averages.py",
    ),
    # loss scale
    ("amp.py", "self._scale * self.backoff_factor", "self._scale", "tests/test_amp.py"),
    (
        "amp.py",
        "_steps >= self.growth_interval",
        "_steps > self.growth_interval",
        "tests/test_amp.py",
    ),
    ("amp.py", '"good_steps": self._good_steps', '"good_steps": 0', "tests/test_amp.py"),
    # arguments
    (
        "arguments.py",
        "<= most and exact < below",
        "<= most and exact <= below",
        "tests/test_arguments.py",
    ),
    (
        "arguments.py",
        "    if exact < least:",
        "    if exact <= least:",
        "tests/test_arguments.py tests/test_amp.py",
    ),
    # row-sparse gradients and tables
    ("sparse.py", "np.add.at(sums", "np.subtract.at(sums", "tests/test_sparse.py"),
    (
        "table/embedding.py",
        "ids[np.sort(np.unique(ids, return_index=True)[1])]",
        "np.unique(ids)",
        "tests/table/test_embedding.py",
    ),
    (
        "table/saved.py",
        "> MOST_ROWS or (used & (last > step)).any()",
        "> MOST_ROWS",
        "tests/table/test_saved.py",
    ),
    # arrays that kernels cannot read as they lie
    (
        "_kernels/strided.py",
        "        uneven |= strides[axis]",
        "        uneven |= 0",
        FORMS,
    ),
    (
        "_engine/enrolment.py",
        "            array[...] = copy",
        "            copy[...] = array",
        FORMS,
    ),
    # calls
    ("arguments.py", "    if is_array(value):  #", "    if False:  #", f"{PROMISES} -k past"),
    ("_engine/records.py", "            averages.update(averaged)\n", "", f"{PROMISES} -k past"),
    ("optimizer/lbsgd.py", '("int32", "int64")', '("int64",)', f"{PROMISES} -k past"),
    ("distributed/updater.py", "is not None and batches.completes(index)", "is False", RANKS),
    # files
    (
        CONTAINER,
        'if _digest(text) != metadata["crc32"]:',
        "if not text:",
        FILES,
    ),
    (CONTAINER, 'if crc != record["crc32"]:', "if crc is None:", FILES),
    (
        CONTAINER,
        "        if end != size:",
        "        if end > size:",
        FILES,
    ),
    # training
    (
        "trainer.py",
        'if number("batch_size", batch_size) <= 0:',
        'if number("batch_size", batch_size) < 0:',
        "tests/test_trainer.py",
    ),
    ("minimization.py", "mean < self.best[0]", "mean > self.best[0]", "tests/test_minimization.py"),
]

"""Defects for ``run.py``: a module, its text, the text of the defect, and tests that catch it."""

__all__ = ["DEFECTS"]

GOLDEN = "tests/optimizer/test_golden.py -k adam"
RECORDED = "tests/optimizer/test_formulas.py"
SCHEDULES = "tests/lr_scheduler/test_schedules.py"
MATRICES = "tests/optimizer/test_packages.py"
CONTAINER = "checkpoint/format/container.py"
RANKS = "tests/distributed/test_threads.py -k plans-3"
PROMISES = "tests/optimizer/test_promises.py"
FORMS = f"{PROMISES} -k plain_form"
FILES = "tests/checkpoint/test_damage.py tests/checkpoint/test_contents.py"
UNITS = "tests/engine/test_clip_adaptive.py"
ACCUMULATE = "tests/engine/test_accumulate.py"
CLIP = "tests/engine/test_clip.py"
NOISE = "tests/kernels/test_noise.py"
DECAY = "tests/engine/test_lazy_decay.py"
OVERLAP = "tests/engine/test_overlap.py"
FINISH = "tests/updater/test_finish.py"
GROUPS = "tests/optimizer/test_groups.py"
DRAWN = "tests/initializer/test_distributions.py"
RNN = "tests/initializer/test_rnn.py"
GRADIENT = "tests/parameter/test_gradient.py tests/test_trainer.py"
RESUMED = f"{PROMISES} -k resumed"
FITTING = "tests/checkpoint/test_fitting.py tests/checkpoint/test_contents.py"
TABLE = "tests/table/test_embedding.py"
TORCH_STATE = "tests/pytorch/test_torch_state.py"
RIVER = "tests/adapters/test_river.py"
SCIKIT_LEARN = "tests/adapters/test_scikit_learn.py"
TABLES = "tests/distributed/test_threads.py -k embeddings-2"
MINIMIZED = "tests/test_minimization.py"
AVERAGES = "tests/test_averages.py"
SCALE = "tests/test_amp.py"
PURE = "tests/test_pure.py"
PARAMETER = "tests/parameter/test_parameter.py"
STRUCTURE = "tests/test_structure.py"
FAMILIES = "tests/optimizer/test_families.py"
RESIZED = "tests/updater/test_resize.py"
LARS = "tests/optimizer/test_every_optimizer.py tests/optimizer/test_packages.py -k lars"
SIGNUM = "tests/optimizer/test_every_optimizer.py tests/optimizer/test_families.py -k signum"
LAMB = "tests/optimizer/test_every_optimizer.py -k lamb"
COPIES = "tests/engine/test_mixed_precision.py"
HALF = "tests/kernels/test_half.py"
IN_NUMBA = "tests/test_in_numba.py -k states_go"
COMPLEX = "tests/test_complex.py -k gets_the_bits"
TORCH = "tests/pytorch/test_torch.py -k SGD"
TORCH_RADAM = "tests/pytorch/test_torch.py -k RAdam"
SPARSE = "tests/test_sparse.py"
SAVED = "tests/table/test_saved.py"
ARGUMENTS = "tests/test_arguments.py"
PAST = f"{PROMISES} -k past"

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
    ("lr_scheduler/factor.py", "(num_update - 1) // self.", "num_update // self.", SCHEDULES),
    ("lr_scheduler/factor.py", "bisect_left(self.step, num_update)", "len(self.step)", SCHEDULES),
    ("lr_scheduler/factor.py", "1 if self.mode ==", "1 if self.mode !=", SCHEDULES),
    ("lr_scheduler/annealing.py", "math.pow(1 - done,", "math.pow(done,", SCHEDULES),
    ("averages.py", "self.decay ** max(t, 1)", "self.decay ** max(t, 2)", AVERAGES),
    ("averages.py", "0.0 if t % self.k else", "0.0 if t % (self.k + 1) else", AVERAGES),
    # loss scale
    ("amp.py", "self._scale * self.backoff_factor", "self._scale", SCALE),
    ("amp.py", "_steps >= self.growth_interval", "_steps > self.growth_interval", SCALE),
    ("amp.py", '"good_steps": self._good_steps', '"good_steps": 0', SCALE),
    # arguments
    ("arguments.py", "<= most and exact < below", "<= most and exact <= below", ARGUMENTS),
    ("arguments.py", "  if exact <", "  if exact <=", "tests/test_arguments.py tests/test_amp.py"),
    # row-sparse gradients and tables
    ("sparse.py", "np.add.at(sums", "np.subtract.at(sums", SPARSE),
    (
        "table/embedding.py",
        "ids[np.sort(np.unique(ids, return_index=True)[1])]",
        "np.unique(ids)",
        TABLE,
    ),
    ("table/saved.py", "> MOST_ROWS or (used & (last > step)).any()", "> MOST_ROWS", SAVED),
    # arrays that kernels cannot read as they lie
    ("_kernels/strided.py", "        uneven |= strides[axis]", "        uneven |= 0", FORMS),
    ("_engine/enrolment.py", "           array[...] = copy", "           copy[...] = array", FORMS),
    # calls
    ("arguments.py", "    if is_array(value):  #", "    if False:  #", PAST),
    ("_engine/records.py", "            averages.update(averaged)\n", "", PAST),
    ("optimizer/lbsgd.py", '("int32", "int64")', '("int64",)', PAST),
    # files
    (CONTAINER, 'if _digest(text) != metadata["crc32"]:', "if not text:", FILES),
    (CONTAINER, 'if crc != record["crc32"]:', "if crc is None:", FILES),
    (CONTAINER, "        if end != size:", "        if end > size:", FILES),
    # kernels
    ("_kernels/clipping.py", "if record.ndims < 2:", "if record.ndims < 3:", UNITS),
    ("_kernels/clipping.py", "record.size // max(units, 1)", "record.size", UNITS),
    ("_kernels/measuring.py", "    norm.factor *= norm.share\n", "", FINISH),
    ("_kernels/measuring.py", "total += doubles(partial)[c]", "total = doubles(partial)[c]", CLIP),
    ("_kernels/noise.py", "hashed + np.uint64(part) + _GAMMA", "np.uint64(part) + _GAMMA", NOISE),
    ("_kernels/half.py", "np.uint32(odd + (_LOWER_HALF - _ONE))", "_LOWER_HALF", HALF),
    ("kernels/variants.py", "1.0 / max(share, LEAST_SHARE)", "max(share, LEAST_SHARE)", FAMILIES),
    ("kernels/scalars.py", "(x < zero and y < zero)", "(x < zero and y > zero)", RECORDED),
    # engine
    ("_engine/accumulate.py", "total + rows if keep else rows", "rows", ACCUMULATE),
    ("_engine/flush.py", "        weight[...] = lies", "        lies[...] = weight", DECAY),
    ("_engine/flush.py", "chunks_of((len(weight), int(", "chunks_of((len(weight) - 1, int(", DECAY),
    ("_engine/mixed_precision.py", " if optimizer.master_last else state[::-1]", "", COPIES),
    ("_engine/overlap.py", "self.last[:-1] > self.first[", "self.last[1:] > self.first[", OVERLAP),
    ("_engine/overlap.py", "ends[before - 1] > first", "ends[before - 1] >= first", OVERLAP),
    # updater
    ("_updater/updater.py", "times(total, calls[0] / count)", "times(total, 1.0)", FINISH),
    ("_updater/updater.py", "share=1 / calls[0])", "share=1.0)", FINISH),
    ("_updater/resizing.py", "kept = rows >= 0", "kept = rows > 0", RESIZED),
    ("_structure.py", "            left.append(name)", "            pass", STRUCTURE),
    # optimizers
    ("optimizer/groups.py", " in self.own or name in MULTIPLIERS", " in MULTIPLIERS", GROUPS),
    ("optimizer/groups.py", "for group in self.groups ", "for group in self.groups[::-1] ", GROUPS),
    ("optimizer/layerwise.py", "h.lr * h.eta * weight / (grad", "h.lr * weight / (grad", LARS),
    ("optimizer/layerwise.py", "if norm > h.upper_bound:", "if norm < h.upper_bound:", LAMB),
    ("optimizer/signs.py", "        grad = grad * zero\n", "", RECORDED),
    ("optimizer/signs.py", "- h.one_minus_momentum * ", "+ h.one_minus_momentum * ", SIGNUM),
    # initializers
    ("initializer/distributions.py", "1] * kernel, arr.shape[0", "0] * kernel, arr.shape[1", DRAWN),
    ("initializer/distributions.py", "2 / (1 + self.slope**2)", "2 / (1 + self.slope)", DRAWN),
    ("initializer/rnn.py", "arr[hidden : 2 * hidden]", "arr[:hidden]", RNN),
    ("initializer/rnn.py", "widths[layer] if source", "widths[0] if source", RNN),
    # schedules and averages
    ("lr_scheduler/base.py", " / self.warmup_steps", " / (self.warmup_steps + 1)", SCHEDULES),
    ("lr_scheduler/base.py", "if num_update < self.", "if num_update <= self.", SCHEDULES),
    ("averages.py", "1 / (passed // self.every + 1)", "1 / (passed + 1)", AVERAGES),
    # parameters
    ("parameter/gradient.py", "if not (always or self._written[i]):", "if not always:", GRADIENT),
    ("parameter/gradient.py", "not fresh or self._summed:", "not fresh:", GRADIENT),
    ("parameter/gradient.py", "(compress(self.buffers, self.fresh))", "(self.buffers)", GRADIENT),
    ("parameter/parameter.py", "*(data.copy() for", "*(data for", PARAMETER),
    # checkpoints
    (
        "checkpoint/restore/restore.py",
        'matching.table(saved["_index_update_count"])',
        "{}",
        RESUMED,
    ),
    (
        "checkpoint/restore/restore.py",
        "if (one.shape, one.dtype) != (other.shape, other.dtype):",
        "if one.shape != other.shape:",
        FITTING,
    ),
    ("checkpoint/restore/restore.py", "        restore_progress()\n", "", RESUMED),
    # embedding tables
    ("table/index.py", "np.exp(-self.rate * age)", "np.exp(self.rate * age)", TABLE),
    ("table/embedding.py", " <= self.step - unused_for", " < self.step - unused_for", TABLE),
    ("table/embedding.py", " + times < self.min_count", " + times <= self.min_count", TABLE),
    # models of torch
    ("torch/rules.py", "ahead = momentum if nesterov else 1.0", "ahead = 1.0", TORCH),
    ("torch/rules.py", "(0.0, wd) if self.decoupled_weight_decay else (wd, ", "(wd, ", TORCH_RADAM),
    (
        "torch/state.py",
        "            and self.own_steps.tobytes() == self.known[0]\n",
        "",
        TORCH_STATE,
    ),
    # adapters
    ("adapters/river.py", "            now[: len(before)] = before\n", "            pass\n", RIVER),
    ("adapters/river.py", "        now[count:end] = values", "        now[count:end] = 0", RIVER),
    ("adapters/scikit_learn.py", "           trained = [*before]", "           pass", SCIKIT_LEARN),
    # ranks
    ("distributed/plan.py", "packed[start : start + last - first", "packed[: last - first", RANKS),
    ("distributed/rows.py", "         target[order] = came", "         target[...] = came", TABLES),
    # minimization, complex weights, pure functions
    ("minimization.py", "    np.clip(leaves[k], low, high, out=leaves[k])", "    pass", MINIMIZED),
    ("minimization.py", "/ m < tol", "< tol", MINIMIZED),
    ("_foreign.py", "np.asarray(array)[..., np.newaxis", "np.conj(array)[..., np.newaxis", COMPLEX),
    ("pure.py", "state is None or state is not self.state:", "self.state is None:", PURE),
    ("pure.py", "flags.writeable = False", "flags.writeable = True", PURE),
    ("vectors.py", "        start += array.size\n", "", "tests/test_vectors.py"),
    ("in_numba.py", "counts[index] = count", "counts[index] = 0", IN_NUMBA),
    # training
    ("trainer.py", '", batch_size) <= 0:', '", batch_size) < 0:', "tests/test_trainer.py"),
    ("minimization.py", "mean < self.best[0]", "mean > self.best[0]", "tests/test_minimization.py"),
]

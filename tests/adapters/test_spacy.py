"""ThincOptimizer trains pipelines of spaCy."""

import pytest
import spacy
from spacy.schemas import ConfigSchemaTraining
from spacy.training import Example
from spacy.util import registry
from thinc.api import fix_random_seed

from fastopt.adapters import ThincOptimizer

BAG = {"@architectures": "spacy.TextCatBOW.v3", "exclusive_classes": True, "ngram_size": 1}
BAG |= {"no_output_layer": False, "length": 5_000}
RATES = {"warmup_steps": 2, "total_steps": 10, "initial_rate": 0.01}
TEXTS = [("what a good film", "good"), ("a bad book", "bad"), ("good food", "good")]
TEXTS += [("bad weather", "bad"), ("this is bad", "bad"), ("I like good music", "good")]
CATS = ("good", "bad")


def test_a_configuration_of_spacy_names_an_optimizer_that_learns():
    fix_random_seed(0)
    nlp = spacy.blank("en")
    nlp.add_pipe("textcat", config={"model": BAG})
    examples = [
        Example.from_dict(nlp.make_doc(text), {"cats": {name: name == cat for name in CATS}})
        for text, cat in TEXTS
    ]
    config = nlp.config.copy()
    config["training"]["optimizer"] = {
        "@optimizers": "fastopt.v1",
        "optimizer": "adamw",
        "learn_rate": {"@schedules": "warmup_linear.v1", **RATES},
        "options": {"wd": 0.01},
    }
    nlp = spacy.util.load_model_from_config(config, auto_fill=True)
    training = nlp.config.interpolate()["training"]
    made = registry.resolve(training, schema=ConfigSchemaTraining)["optimizer"]
    assert type(made) is ThincOptimizer
    nlp.initialize(lambda: examples, sgd=made)
    rates, losses = [], []
    for _ in range(9):
        losses.append(float(nlp.update(examples, sgd=made)["textcat"]))
        made.step_schedules()
        rates.append(made.learn_rate)
    assert rates[:2] == pytest.approx([0.005, 0.01])
    assert losses[-1] < 0.7 * losses[0]
    assert made.updater.optimizer.wd == 0.01

"""ThincOptimizer trains pipelines of spaCy."""

import pytest
import spacy
from spacy.schemas import ConfigSchemaTraining
from spacy.training import Example
from spacy.util import registry
from thinc.api import Adam, fix_random_seed

from fastopt.adapters import ThincOptimizer

BAG = {
    "@architectures": "spacy.TextCatBOW.v3",
    "exclusive_classes": True,
    "ngram_size": 1,
    "no_output_layer": False,
    "length": 5_000,
}
TEXTS = [("what a good film", "good"), ("a bad book", "bad"), ("good food", "good")]
TEXTS += [("bad weather", "bad"), ("this is bad", "bad"), ("I like good music", "good")]
CATS = ("good", "bad")


def pipeline():
    fix_random_seed(0)
    nlp = spacy.blank("en")
    nlp.add_pipe("textcat", config={"model": BAG})
    examples = [
        Example.from_dict(nlp.make_doc(text), {"cats": {name: name == cat for name in CATS}})
        for text, cat in TEXTS
    ]
    return nlp, examples


def losses(optimizer, steps=15):
    nlp, examples = pipeline()
    nlp.initialize(lambda: examples, sgd=optimizer)
    found = []
    for _ in range(steps):
        of = nlp.update(examples, sgd=optimizer)
        found.append(float(of["textcat"]))
    return found, nlp


def test_a_blank_pipeline_learns_with_the_losses_of_thincs_adam():
    theirs, _ = losses(Adam(0.01, use_averages=False))
    ours, nlp = losses(ThincOptimizer(learn_rate=0.01))
    assert ours[-1] < ours[0] / 2
    assert ours == pytest.approx(theirs, rel=1e-3)
    cats = nlp("a good song").cats
    assert cats["good"] > cats["bad"]


def test_averages_are_used_for_predictions():
    optimizer = ThincOptimizer(learn_rate=0.01, use_averages=True)
    _, nlp = losses(optimizer, 5)
    alone = nlp("good").cats["good"]
    with nlp.use_params(optimizer.averages):
        averaged = nlp("good").cats["good"]
    assert averaged != alone
    assert nlp("good").cats["good"] == alone


def test_a_configuration_of_spacy_names_it(tmp_path):
    nlp, examples = pipeline()
    config = nlp.config.copy()
    config["training"]["optimizer"] = {
        "@optimizers": "fastopt.v1",
        "optimizer": "adamw",
        "learn_rate": {
            "@schedules": "warmup_linear.v1",
            "warmup_steps": 2,
            "total_steps": 10,
            "initial_rate": 0.01,
        },
        "options": {"wd": 0.01},
    }
    nlp = spacy.util.load_model_from_config(config, auto_fill=True)
    training = nlp.config.interpolate()["training"]
    made = registry.resolve(training, schema=ConfigSchemaTraining)["optimizer"]
    assert type(made) is ThincOptimizer
    nlp.initialize(lambda: examples, sgd=made)
    rates = []
    for _ in range(3):
        nlp.update(examples, sgd=made)
        made.step_schedules()
        rates.append(made.learn_rate)
    assert rates[0] == pytest.approx(0.005)
    assert rates[1] == pytest.approx(0.01)
    assert made.updater.optimizer.wd == 0.01
